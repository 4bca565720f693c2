/** Arrays as they are stored: a type by numpy's name, a shape, and the numbers. */
import { product } from "../../federation/space.ts";

const KINDS = {
  bool: Uint8Array,
  uint8: Uint8Array,
  int8: Int8Array,
  uint16: Uint16Array,
  int16: Int16Array,
  uint32: Uint32Array,
  int32: Int32Array,
  uint64: BigUint64Array,
  int64: BigInt64Array,
  float16: Uint16Array, // its bits
  float32: Float32Array,
  float64: Float64Array,
} as const;

export type DType = keyof typeof KINDS;
export type Numbers = InstanceType<(typeof KINDS)[DType]>;

export interface Stored {
  readonly dtype: DType;
  readonly shape: readonly number[];
  readonly data: Numbers;
}

export const isInteger = (dtype: string): boolean => /^u?int/.test(dtype);
export const isFloat = (dtype: string): boolean => dtype.startsWith("float");

export function isType(dtype: string): dtype is DType {
  return Object.hasOwn(KINDS, dtype);
}

/** Make room for so many numbers, or look at bytes that are there. */
export function numbers(dtype: DType, lengthOrBytes: number | ArrayBuffer): Numbers {
  return new (KINDS[dtype] as new (from: number | ArrayBuffer) => Numbers)(lengthOrBytes);
}

export function itemSize(dtype: DType): number {
  return KINDS[dtype].BYTES_PER_ELEMENT;
}

/** Take rows by their numbers. */
export function takeRows(stored: Stored, indices: ArrayLike<number>): Stored {
  const each = product(stored.shape.slice(1));
  const data = numbers(stored.dtype, indices.length * each);
  for (let place = 0; place < indices.length; place++) {
    const row = stored.data.subarray(indices[place]! * each, (indices[place]! + 1) * each);
    (data.set as (from: Numbers, at: number) => void).call(data, row, place * each);
  }
  return { dtype: stored.dtype, shape: [indices.length, ...stored.shape.slice(1)], data };
}

export function shapeText(shape: readonly number[]): string {
  return shape.join("×") || "single numbers";
}

export function sameButForOnes(left: readonly number[], right: readonly number[]): boolean {
  const bare = (shape: readonly number[]): string => shape.filter((length) => length !== 1).join();
  return bare(left) === bare(right);
}
