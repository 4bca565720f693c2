/** Stored activations: what the frozen layers made of the local data, in memory or in a file of the browser's own. */
import { OutOfMemory } from "../federation/errors.ts";
import type { TensorSpec } from "../federation/manifest.ts";
import { product, type Bytes } from "../federation/space.ts";
import { isType, itemSize, numbers, type DType, type Numbers } from "./data/arrays.ts";
import { fromHalf, toHalf } from "./half.ts";

/** Bytes by their place: memory, or a file. */
export interface Room {
  read(into: Bytes, at: number): void;
  write(from: Bytes, at: number): void;
  close(): void;
}

/** Make room for so many bytes. */
export type MakeRoom = (bytes: number) => Promise<Room>;

export async function inMemory(bytes: number): Promise<Room> {
  let memory: Bytes;
  try {
    memory = new Uint8Array(bytes);
  } catch {
    throw new OutOfMemory(`not enough memory to store ${bytes} bytes of activations`);
  }
  return {
    read: (into, at) => into.set(memory.subarray(at, at + into.length)),
    write: (from, at) => memory.set(from, at),
    close: () => void (memory = new Uint8Array(0)),
  };
}

/** Rows of one shape, written in order, read in any. float16 halves the bytes; rows come back as float32. */
export class ActivationStore {
  private constructor(
    private readonly room: Room,
    readonly bytes: number,
    private readonly row: TensorSpec,
    private readonly stored: DType,
  ) {}

  static async make(count: number, row: TensorSpec, storedAs: "float32" | "float16", makeRoom: MakeRoom): Promise<ActivationStore> {
    if (!isType(row.dtype)) throw new OutOfMemory(`activations of type ${row.dtype} cannot be stored here`);
    const stored = row.dtype === "float32" ? storedAs : row.dtype;
    const bytes = count * product(row.shape) * itemSize(stored);
    return new ActivationStore(await makeRoom(bytes), bytes, row, stored);
  }

  /** Store rows from number `start` on. */
  write(start: number, batch: Numbers): void {
    const rows = this.stored === "float16" ? Uint16Array.from(batch as Float32Array, toHalf) : batch;
    this.room.write(bytesOf(rows), start * this.rowBytes);
  }

  /** Read some rows as the next layer takes them. */
  read(indices: ArrayLike<number>): Numbers {
    const each = product(this.row.shape);
    const rows = numbers(this.stored, indices.length * each);
    for (let place = 0; place < indices.length; place++) {
      this.room.read(bytesOf(rows.subarray(place * each, (place + 1) * each)), indices[place]! * this.rowBytes);
    }
    return this.stored === "float16" && this.row.dtype === "float32" ? Float32Array.from(rows as Uint16Array, fromHalf) : rows;
  }

  /** Give memory or disk back. */
  close(): void {
    this.room.close();
  }

  private get rowBytes(): number {
    return product(this.row.shape) * itemSize(this.stored);
  }
}

function bytesOf(rows: Numbers): Bytes {
  return new Uint8Array(rows.buffer as ArrayBuffer, rows.byteOffset, rows.byteLength);
}
