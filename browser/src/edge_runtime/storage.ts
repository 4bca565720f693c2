/** What a browser keeps of this device between visits: IndexedDB, one table for each kind of thing. */
import type { Kept } from "../federation/device_task.ts";
import type { MeasuredNeed } from "../federation/capacity.ts";
import type { Report } from "../federation/messages.ts";
import type { Bytes } from "../federation/space.ts";
import type { Dataset } from "./data/samples.ts";

/** Values by key. */
export interface Table<T> {
  get(key: string): Promise<T | undefined>;
  put(key: string, value: T): Promise<void>;
  delete(key: string): Promise<void>;
  entries(): Promise<[string, T][]>;
}

/** An update that is trained and not yet acknowledged. */
export interface PendingUpload {
  readonly job: string;
  readonly body: Bytes;
  readonly report: Report;
}

/** What the person decided, and what the coordinator gave. */
export interface DeviceRecord {
  readonly name: string;
  readonly device?: string; // once it is enrolled
  readonly token: string; // the device's own, or before that the enrolment token
  readonly memory: number; // bytes
  readonly threads: number;
  readonly running: boolean; // whether it goes on after a reload
  readonly pauseHidden: boolean;
  readonly pauseOnBattery: boolean;
  readonly pauseMetered: boolean;
  readonly needs: readonly MeasuredNeed[];
  readonly signer?: string; // of the bundles that this device trains
}

/** A round that this device helped with. */
export interface DoneRound {
  readonly job: string; // empty if it was sent after a reload
  readonly round: number;
  readonly loss: number | null;
}

export interface Storage {
  readonly device: Table<DeviceRecord>; // one, under SELF
  readonly data: Table<Dataset>; // one, under SELF
  readonly graphs: Table<Bytes>; // by sha256
  readonly history: Table<readonly DoneRound[]>; // one, under SELF
  readonly kept: Table<Kept & { readonly job: string }>; // by task
  readonly uploads: Table<PendingUpload>; // by task
}

export const SELF = "self";
const NAME = "embrace";
const VERSION = 2; // more with every new table
const TABLES = ["device", "data", "graphs", "history", "kept", "uploads"] as const;

/** Open the database of this page's origin. */
export async function openStorage(): Promise<Storage> {
  const opening = indexedDB.open(NAME, VERSION);
  opening.onupgradeneeded = () => {
    const { result } = opening;
    TABLES.filter((table) => !result.objectStoreNames.contains(table)).forEach((table) => result.createObjectStore(table));
  };
  const database = await done(opening);
  database.onversionchange = () => database.close(); // a newer page in another tab
  return Object.fromEntries(TABLES.map((table) => [table, new StoredTable(database, table)])) as unknown as Storage;
}

/** Remove everything but some tables. */
export async function forgetEverything(storage: Storage, but: readonly (keyof Storage)[] = []): Promise<void> {
  for (const table of TABLES.filter((each) => !but.includes(each))) {
    for (const [key] of await storage[table].entries()) await storage[table].delete(key);
  }
}

class StoredTable<T> implements Table<T> {
  constructor(
    private readonly database: IDBDatabase,
    private readonly name: string,
  ) {}

  async get(key: string): Promise<T | undefined> {
    return (await done(this.open("readonly").get(key))) as T | undefined;
  }

  async put(key: string, value: T): Promise<void> {
    await written(this.open("readwrite").put(value, key));
  }

  async delete(key: string): Promise<void> {
    await written(this.open("readwrite").delete(key));
  }

  async entries(): Promise<[string, T][]> {
    const table = this.open("readonly");
    const [keys, values] = await Promise.all([done(table.getAllKeys()), done(table.getAll())]);
    return keys.map((key, place) => [String(key), values[place] as T]);
  }

  private open(mode: IDBTransactionMode): IDBObjectStore {
    return this.database.transaction(this.name, mode, { durability: "strict" }).objectStore(this.name);
  }
}

function done<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Wait until it is on the disk. */
function written(request: IDBRequest): Promise<void> {
  return new Promise((resolve, reject) => {
    const { transaction } = request;
    transaction!.oncomplete = () => resolve();
    transaction!.onabort = transaction!.onerror = () => reject(transaction!.error ?? request.error);
  });
}
