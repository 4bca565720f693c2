/**
 * A session whose tensors stay in the runtime's memory: made once, read and written in place, so that a run copies nothing but the
 * batch. onnxruntime-web's own `run` copies every input in and every output out, 26 MB of each for a model of 6.6 million numbers.
 */
import { EmbraceError, OutOfMemory } from "../federation/errors.ts";
import type { Vector } from "../federation/space.ts";
import type { DType, Numbers } from "./data/arrays.ts";
import { runtime, type Instance } from "./runtime.ts";
import type { Session } from "./session.ts";

const WORD = 4; // bytes of an address
const ON_CPU = 1;
const DTYPES: Readonly<Partial<Record<DType, number>>> = { float32: 1, int64: 7 }; // of onnx.proto3

interface Block {
  readonly place: number;
  readonly bytes: number;
}

interface Bound {
  readonly name: number; // where its letters are
  readonly tensor: number;
}

export class BoundSession {
  private readonly instance: Instance = runtime().instance;
  private readonly handle: number;
  private readonly blocks: Block[] = [];
  private readonly fed = new Map<string, Block>();
  private readonly inputs = new Map<string, Bound>();
  private readonly outputs = new Map<string, Bound>();

  constructor(private readonly session: Session) {
    this.handle = (session as unknown as { handler: { sessionId: number } }).handler.sessionId;
  }

  get inputNames(): readonly string[] {
    return this.session.inputNames;
  }

  /** Reserve a vector in the runtime's memory, until the session is released. */
  vector(length: number): Vector {
    const { place } = this.reserve(4 * length);
    return new Float32Array(this.instance.HEAPU8.buffer, place, length).fill(0);
  }

  /** Let the graph read a value where it lies. */
  bindInput(name: string, part: Vector, shape: readonly number[]): void {
    this.bind(this.inputs, name, "float32", part.byteOffset, part.byteLength, shape);
  }

  /** Let the graph write a value where it belongs. */
  bindOutput(name: string, part: Vector, shape: readonly number[]): void {
    this.bind(this.outputs, name, "float32", part.byteOffset, part.byteLength, shape);
  }

  /** Give the next run an input that changes from run to run. */
  feed(name: string, dtype: DType, data: Numbers, shape: readonly number[]): void {
    let block = this.fed.get(name);
    if (block === undefined || block.bytes !== data.byteLength) {
      if (block !== undefined) this.give(block);
      this.fed.set(name, (block = this.reserve(data.byteLength)));
      this.bind(this.inputs, name, dtype, block.place, block.bytes, shape);
    }
    this.instance.HEAPU8.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), block.place);
  }

  async run(): Promise<void> {
    const stack = this.instance.stackSave();
    try {
      const [inputNames, inputs] = this.table(this.inputs);
      const [outputNames, outputs] = this.table(this.outputs);
      const failed = await this.instance._OrtRun(this.handle, inputNames, inputs, this.inputs.size, outputNames, this.outputs.size, outputs, 0);
      if (failed !== 0) throw new EmbraceError(this.lastError());
    } finally {
      this.instance.stackRestore(stack);
    }
  }

  async release(): Promise<void> {
    for (const { tensor } of [...this.inputs.values(), ...this.outputs.values()]) this.instance._OrtReleaseTensor(tensor);
    for (const { place } of this.blocks.splice(0)) this.instance._free(place);
    for (const bound of [this.inputs, this.outputs, this.fed]) bound.clear();
    await this.session.release();
  }

  private bind(bound: Map<string, Bound>, name: string, dtype: DType, place: number, bytes: number, shape: readonly number[]): void {
    const { instance } = this;
    const known = bound.get(name);
    if (known !== undefined) instance._OrtReleaseTensor(known.tensor);
    const stack = instance.stackSave();
    try {
      const lengths = instance.stackAlloc(WORD * Math.max(1, shape.length));
      shape.forEach((length, at) => instance.setValue(lengths + WORD * at, length, "i32"));
      const tensor = instance._OrtCreateTensor(DTYPES[dtype]!, place, bytes, lengths, shape.length, ON_CPU);
      if (tensor === 0) throw new EmbraceError(this.lastError());
      bound.set(name, { name: known?.name ?? this.letters(name), tensor });
    } finally {
      instance.stackRestore(stack);
    }
  }

  /** Write addresses of names and of tensors on the stack. */
  private table(bound: ReadonlyMap<string, Bound>): [number, number] {
    const { instance } = this;
    const [names, tensors] = [instance.stackAlloc(WORD * bound.size), instance.stackAlloc(WORD * bound.size)];
    [...bound.values()].forEach(({ name, tensor }, at) => {
      instance.setValue(names + WORD * at, name, "*");
      instance.setValue(tensors + WORD * at, tensor, "*");
    });
    return [names, tensors];
  }

  private reserve(bytes: number): Block {
    const place = this.instance._malloc(Math.max(1, bytes));
    if (place === 0) throw new OutOfMemory(`not enough memory for ${bytes} bytes`);
    this.blocks.push({ place, bytes });
    return this.blocks.at(-1)!;
  }

  private give(block: Block): void {
    this.blocks.splice(this.blocks.indexOf(block), 1);
    this.instance._free(block.place);
  }

  private letters(text: string): number {
    const bytes = this.instance.lengthBytesUTF8(text) + 1;
    const { place } = this.reserve(bytes);
    this.instance.stringToUTF8(text, place, bytes);
    return place;
  }

  private lastError(): string {
    const { instance } = this;
    const stack = instance.stackSave();
    try {
      const told = instance.stackAlloc(2 * WORD);
      instance._OrtGetLastError(told, told + WORD);
      const message = instance.getValue(told + WORD, "*");
      return message ? instance.UTF8ToString(message) : `error ${instance.getValue(told, "i32")}`;
    } finally {
      instance.stackRestore(stack);
    }
  }
}
