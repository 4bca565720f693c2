/**
 * ParameterSpace: every parameter of a model as a slice of ONE flat float32 vector.
 *
 * Layers are contiguous and stand input side first, so "the last layers" is a suffix of the vector.
 */
import { InputError } from "./errors.ts";

export type Vector = Float32Array<ArrayBuffer>;
export type Bytes = Uint8Array<ArrayBuffer>;
export type Kind = "weight" | "statistic";

export interface Slice {
  readonly start: number;
  readonly stop: number;
}

/** One named tensor; a `weight` has a gradient, a `statistic` gets a new value from every training step. */
export interface Parameter {
  readonly name: string;
  readonly kind: Kind;
  readonly shape: readonly number[];
}

/** Multiply the numbers of a shape. */
export function product(shape: readonly number[]): number {
  return shape.reduce((size, length) => size * length, 1);
}

export class ParameterSpace {
  readonly size: number;
  private readonly slices = new Map<string, Slice>();
  private readonly starts: number[] = [];

  constructor(readonly layers: readonly (readonly Parameter[])[]) {
    let offset = 0;
    for (const layer of layers) {
      this.starts.push(offset);
      for (const parameter of layer) {
        if (this.slices.has(parameter.name)) {
          throw new InputError(`parameter '${parameter.name}' appears twice; each belongs to one layer`);
        }
        const stop = offset + product(parameter.shape);
        this.slices.set(parameter.name, { start: offset, stop });
        offset = stop;
      }
    }
    this.starts.push(offset);
    this.size = offset;
  }

  *[Symbol.iterator](): Iterator<Parameter> {
    for (const layer of this.layers) yield* layer;
  }

  /** Find one parameter in the flat vector. */
  sliceOf(name: string): Slice {
    const found = this.slices.get(name);
    if (found === undefined) throw new InputError(`no parameter named '${name}' in this model`);
    return found;
  }

  /** Find the smallest range with all of some parameters. */
  around(parameters: readonly Parameter[]): Slice {
    const slices = parameters.map(({ name }) => this.sliceOf(name));
    return slices.length === 0 ? { start: 0, stop: 0 } : { start: Math.min(...slices.map((s) => s.start)), stop: Math.max(...slices.map((s) => s.stop)) };
  }

  /** Find one layer in the flat vector. */
  layer(index: number): Slice {
    return { start: this.starts[index]!, stop: this.starts[index + 1]! };
  }

  /** Find everything from one layer to the output. */
  suffix(firstLayer: number): Slice {
    return { start: this.starts[firstLayer]!, stop: this.size };
  }
}
