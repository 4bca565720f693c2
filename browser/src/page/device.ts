/** This browser as a device: what it has, what it keeps, its worker, and when it pauses by itself. */
import { DeviceClient, type OpenJob } from "../edge_runtime/client.ts";
import type { Dataset } from "../edge_runtime/data/samples.ts";
import { forgetEverything, openStorage, SELF, type DeviceRecord, type DoneRound, type Storage } from "../edge_runtime/storage.ts";
import type { BoundaryCost } from "../federation/benchmark.ts";
import { messageOf } from "../federation/errors.ts";
import type { Report } from "../federation/messages.ts";
import { measureDevice } from "./measuring.ts";
import type { FromWorker, Stop } from "./protocol.ts";

const LOW_BATTERY = 0.3;
const LOCK = "embrace agent";
const MOST_EVENTS = 8;
const MOST_ROUNDS = 1000; // that are remembered
const FRESH_STARTS = 5; // in a row, without a task that was done

interface Battery extends EventTarget {
  readonly charging: boolean;
  readonly level: number;
}

interface Connection extends EventTarget {
  readonly saveData?: boolean;
  readonly type?: string;
}

const hardware = navigator as Navigator & {
  readonly deviceMemory?: number; // GB
  readonly connection?: Connection;
  getBattery?(): Promise<Battery>;
};

/** What a person sees. */
export interface View {
  readonly state: "off" | "starting" | "waiting" | "training" | "sending" | "pausing" | "paused" | "measuring" | "refused" | "elsewhere";
  readonly why: string; // of a pause, of waiting
  readonly trouble: string; // with the connection
  readonly task: (FromWorker & { kind: "began" }) | undefined;
  readonly progress: { readonly what: string; readonly done: number; readonly total: number } | undefined;
  readonly last: Report | undefined; // since the page was opened
  readonly events: readonly string[];
  readonly threads: number;
  readonly battery: { readonly level: number; readonly charging: boolean } | undefined;
}

/** Bytes for training that are suggested: a quarter of the memory, as far as the browser says how much that is. */
export function suggestedMemory(): number {
  return Math.min(1e9, ((hardware.deviceMemory ?? 2) / 4) * 1e9);
}

/** Threads that are suggested: half of the processors, so that the phone stays usable. */
export function suggestedThreads(): number {
  return globalThis.crossOriginIsolated ? Math.max(1, Math.min(4, Math.floor((navigator.hardwareConcurrency || 2) / 2))) : 1;
}

export class BrowserDevice {
  view: View = {
    state: "off", why: "", trouble: "", task: undefined, progress: undefined, last: undefined, events: [], threads: 1, battery: undefined,
  };
  record: DeviceRecord | undefined;
  history: readonly DoneRound[] = []; // rounds that this device helped with
  data: Dataset | undefined;
  private worker: Worker | undefined;
  private lock: WakeLockSentinel | undefined;
  private battery: Battery | undefined;
  private freshStarts = 0;
  private adjusting: Promise<void> = Promise.resolve(); // one after the other
  private alone: Promise<boolean> | undefined;
  private ended: (() => void) | undefined;

  private constructor(
    private readonly storage: Storage,
    private readonly changed: () => void,
  ) {}

  /** Open what this browser keeps; goes on if it was at work when the page was left. */
  static async open(changed: () => void): Promise<BrowserDevice> {
    const device = new BrowserDevice(await openStorage(), changed);
    device.record = await device.storage.device.get(SELF);
    device.data = await device.storage.data.get(SELF);
    device.history = (await device.storage.history.get(SELF)) ?? [];
    await device.watchSurroundings();
    if (device.record?.device !== undefined && (await device.isAlone())) void device.adjust();
    return device;
  }

  get joined(): boolean {
    return this.record?.device !== undefined;
  }

  /** Ask what is trained here, with the device's own token or an enrolment token. */
  openJobs(enrolment: string | undefined): Promise<OpenJob[]> {
    return new DeviceClient(location.origin, this.record?.token ?? enrolment ?? "", { patience: 20 }).openJobs();
  }

  /** Keep local data in this browser. */
  async setData(data: Dataset): Promise<void> {
    await this.storage.data.put(SELF, data);
    this.data = data;
    this.changed();
  }

  /** Enrol and begin. */
  async join(enrolment: string, choices: Omit<DeviceRecord, "device" | "token" | "needs" | "running" | "signer">): Promise<void> {
    if (!(await this.isAlone())) throw new Error("another tab of this page is at work already");
    await navigator.storage.persist?.();
    const client = new DeviceClient(location.origin, enrolment, { patience: 20 });
    const { name, memory, threads } = choices;
    const { device, token } = await client.enrol(name, { memory, threads, runtime: "onnxruntime-web", engines: ["portable"], needs: [] });
    await this.keep({ ...choices, device, token, needs: [], running: true });
    await this.adjust();
  }

  async pause(): Promise<void> {
    await this.keep({ running: false });
    await this.adjust();
  }

  async resume(): Promise<void> {
    await this.keep({ running: true });
    this.freshStarts = 0;
    await this.adjust();
  }

  /** Measure what training costs here, with the agent stopped, and tell the coordinator. */
  measure(id: string): Promise<void> {
    const newest = async (): Promise<OpenJob> => {
      const job = (await this.openJobs(undefined)).find((each) => each.id === id);
      if (job === undefined) throw new Error("the job is over");
      return job;
    };
    return this.inTurn(async () => {
      await this.stop("the person measures this device");
      this.show({ state: "measuring", why: "", task: undefined, progress: undefined });
      try {
        const found = await measureDevice(this.record!, newest, (done, total) => this.show({ progress: { what: "measure", done, total } }));
        await new DeviceClient(location.origin, this.record!.token, { patience: 20 }).sendBenchmark(found);
        this.note(`measured and sent: ${found.costs.map(inWords).join("; ")}`);
      } catch (error) {
        this.note(`this device could not be measured: ${messageOf(error)}`);
      }
      this.show({ state: "off", progress: undefined });
      await this.adjustNow();
    });
  }

  /** End for good: this device is removed here and at the coordinator; `forget` removes the data here, too. */
  leave(forget: boolean): Promise<void> {
    return this.inTurn(async () => {
      await this.stop(forget ? "the person asked to be forgotten" : "the person left");
      if (this.record !== undefined) {
        await new DeviceClient(location.origin, this.record.token, { patience: 5 }).leave().catch(() => {});
      }
      await forgetEverything(this.storage, forget ? [] : ["data", "graphs"]);
      this.record = undefined;
      this.history = [];
      if (forget) this.data = undefined;
      this.show({ state: "off", why: "", trouble: "", task: undefined, progress: undefined, last: undefined, events: [] });
    });
  }

  private async keep(some: Partial<DeviceRecord>): Promise<void> {
    this.record = { ...(await this.storage.device.get(SELF)), ...some } as DeviceRecord;
    await this.storage.device.put(SELF, this.record);
  }

  /** Do something once what was begun before is done: stopping takes a while, and much may change meanwhile. */
  private inTurn(act: () => Promise<void>): Promise<void> {
    return (this.adjusting = this.adjusting.then(act, act));
  }

  private adjust(): Promise<void> {
    return this.inTurn(() => this.adjustNow());
  }

  /** Start, stop or go on as the person and the surroundings want it now. */
  private async adjustNow(): Promise<void> {
    if (!this.joined || this.view.state === "refused" || this.view.state === "elsewhere") return;
    const why = this.record!.running ? this.reasonToPause() : "you paused it";
    if (why) {
      await this.stop(why);
      this.show({ state: "paused", why, progress: undefined });
    } else if (this.worker === undefined && this.data !== undefined) {
      this.start();
    }
  }

  private reasonToPause(): string {
    const record = this.record!;
    const connection = hardware.connection;
    if (record.pauseHidden && document.visibilityState === "hidden") return "the page is not visible";
    if (record.pauseOnBattery && this.battery && !this.battery.charging && this.battery.level < LOW_BATTERY) return "the battery is low";
    if (record.pauseMetered && (connection?.saveData || connection?.type === "cellular")) return "the connection is metered";
    return "";
  }

  private start(): void {
    this.show({ state: "starting", why: "", progress: undefined });
    this.worker = new Worker(new URL("./worker.ts", import.meta.url), { type: "module", name: LOCK });
    this.worker.onmessage = ({ data }: MessageEvent<FromWorker>) => this.hear(data);
    this.worker.onerror = (event) => this.hear({ kind: "ended", how: "broken", message: event.message || "the worker could not start" });
    void this.keepAwake();
  }

  private async stop(reason: string): Promise<void> {
    if (this.worker === undefined) return;
    this.show({ state: "pausing", why: reason });
    const worker = this.worker;
    const ended = new Promise<void>((resolve) => (this.ended = resolve));
    worker.postMessage({ kind: "stop", reason } satisfies Stop);
    await Promise.race([ended, new Promise((resolve) => setTimeout(resolve, 10_000))]);
    this.end(worker);
  }

  private end(worker: Worker | undefined): void {
    worker?.terminate();
    if (this.worker === worker) this.worker = undefined;
    void this.lock?.release();
    this.lock = undefined;
  }

  private hear(message: FromWorker): void {
    switch (message.kind) {
      case "ready":
        return this.show({ state: "waiting", threads: message.threads });
      case "waiting":
        return this.show({ state: "waiting", why: message.why, progress: undefined });
      case "trouble":
        return this.show({ trouble: message.why });
      case "began":
        return this.show({ state: "training", task: message, why: "" });
      case "progress":
        return this.show({ progress: message, state: message.what === "train" && message.done === message.total ? "sending" : "training" });
      case "sent":
        this.freshStarts = 0;
        void this.remember({ job: message.job, round: message.report.round, loss: message.report.loss });
        return this.show({ state: "waiting", why: "", trouble: "", progress: undefined, last: message.report });
      case "note":
        return this.note(message.text);
      case "failed":
        return this.note(`a task was given back: ${message.message}`);
      case "ended":
        return this.hearTheEnd(message.how, message.message);
    }
  }

  private hearTheEnd(how: (FromWorker & { kind: "ended" })["how"], message: string): void {
    this.ended?.();
    this.end(this.worker);
    if (how === "stopped") return;
    if (how === "refused") return this.show({ state: "refused", why: message, progress: undefined });
    if (how === "broken") this.note(message);
    if (++this.freshStarts > FRESH_STARTS) {
      void this.keep({ running: false });
      return this.show({ state: "paused", why: message || "training does not fit the memory that you allow" });
    }
    setTimeout(() => void this.adjust(), how === "broken" ? 1000 * 2 ** this.freshStarts : 0); // with a fresh runtime
  }

  private async remember(round: DoneRound): Promise<void> {
    this.history = [...this.history, round].slice(-MOST_ROUNDS);
    await this.storage.history.put(SELF, this.history);
  }

  private note(event: string): void {
    const time = new Date().toLocaleTimeString();
    this.show({ events: [`${time} ${event}`, ...this.view.events].slice(0, MOST_EVENTS) });
  }

  private show(some: Partial<View>): void {
    this.view = { ...this.view, ...some };
    this.changed();
  }

  private async keepAwake(): Promise<void> {
    try {
      this.lock ??= await navigator.wakeLock?.request("screen");
    } catch {
      // the page is hidden, or the browser does not want to: training goes on for as long as it lets us
    }
  }

  private async watchSurroundings(): Promise<void> {
    const adjust = (): void => void this.adjust();
    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState === "visible" && this.worker !== undefined) void this.keepAwake();
      adjust();
    });
    hardware.connection?.addEventListener?.("change", adjust);
    try {
      this.battery = await hardware.getBattery?.();
    } catch {
      return; // not every page may ask
    }
    const { battery } = this;
    if (battery === undefined) return;
    const look = (): void => this.show({ battery: { level: battery.level, charging: battery.charging } });
    for (const event of ["levelchange", "chargingchange"]) battery.addEventListener(event, () => (look(), adjust()));
    look();
  }

  /** One tab at a time is this device; the lock is held until the tab is closed. Another tab then takes over. */
  private isAlone(): Promise<boolean> {
    return (this.alone ??= new Promise((resolve, reject) => {
      navigator.locks
        .request(LOCK, { ifAvailable: true }, (lock) => {
          resolve(lock !== null);
          if (lock !== null) return new Promise<void>(() => {});
          this.show({ state: "elsewhere" });
          void navigator.locks.request(LOCK, () => location.reload());
          return undefined;
        })
        .catch((error: unknown) => reject(new Error(messageOf(error))));
    }));
  }
}

function inWords({ boundary, tiers, seconds, memory, problem }: BoundaryCost): string {
  const name = tiers.length > 0 ? tiers.join(", ") : boundary;
  return seconds === null ? `${name}: ${problem}` : `${name} ${(1000 * seconds.batch).toFixed(1)} ms a batch, ${((memory ?? 0) / 1e6).toFixed(0)} MB`;
}
