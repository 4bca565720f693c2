/** How stored inputs become what a model takes, and what cannot: shape, type, scale, values. */
import { DataError, EmptyData } from "../../federation/errors.ts";
import type { Manifest, Preprocessing } from "../../federation/manifest.ts";
import { product, type Vector } from "../../federation/space.ts";
import { fromHalf } from "../half.ts";
import { isFloat, isInteger, isType, numbers, sameButForOnes, shapeText, type DType, type Numbers, type Stored } from "./arrays.ts";

/** From stored samples to inputs of the model. */
export interface InputFit {
  readonly dtype: DType;
  readonly shape: readonly number[];
  readonly channelsLast: boolean; // stored H×W×C, the model takes C×H×W
  readonly scaled: boolean; // bytes are brightness from 0 to 255; a model of floats takes 0 to 1
  readonly preprocessing: Preprocessing; // the bundle's
}

/** Find how samples fit the model; a DataError shows what they are and what it takes. */
export function fitInputs(name: string, stored: Stored, manifest: Manifest): InputFit {
  const { dtype, shape } = manifest.input;
  if (stored.shape.length === 0) throw new DataError(`${name}: the inputs are a single number, expected an array`);
  if (stored.shape[0] === 0) throw new EmptyData(`${name} has no samples`);
  const own = stored.shape.slice(1);
  const has = `${name} has samples of ${shapeText(own)} (${stored.dtype})`;
  const takes = `the model '${manifest.name}' takes ${shapeText(shape)} (${dtype})`;
  if (!isType(dtype) || !["float32", "int64", "int32"].includes(dtype)) throw new DataError(`${has}, ${takes}: this agent cannot give it that type`);
  if (isInteger(dtype) && !isInteger(stored.dtype)) throw new DataError(`${has}, ${takes}: expected integers`);
  const { preprocessing } = manifest;
  const scaled = stored.dtype === "uint8" && isFloat(dtype) && preprocessing.scale === undefined;
  if (sameButForOnes(own, shape) || (own.length === 1 && own[0] === product(shape))) {
    return { dtype, shape, channelsLast: false, scaled, preprocessing };
  }
  if (shape.length === 3 && own.join() === [...shape.slice(1), shape[0]].join()) {
    return { dtype, shape, channelsLast: true, scaled, preprocessing };
  }
  throw new DataError(`${has}, ${takes}`);
}

/** Make inputs of the model. */
export function convert(fit: InputFit, raw: Stored): Numbers {
  const moved = fit.channelsLast ? channelsFirst(raw, fit.shape) : raw.data;
  if (fit.dtype === "float32") {
    const found = new Float32Array(moved.length);
    const scale = Math.fround(fit.preprocessing.scale ?? 1);
    for (let i = 0; i < moved.length; i++) {
      const plain = value(raw.dtype, moved[i]!);
      found[i] = fit.scaled ? plain / 255 : Math.fround(plain) * scale;
    }
    return normalise(fit, found);
  }
  if (raw.dtype === fit.dtype) return moved;
  const found = numbers(fit.dtype, moved.length);
  const wide = found instanceof BigInt64Array;
  for (let i = 0; i < moved.length; i++) found[i] = wide ? BigInt(moved[i]!) : Number(moved[i]!);
  return found;
}

/** Subtract the mean and divide by the deviation, in place. */
function normalise({ shape, preprocessing: { mean, std } }: InputFit, values: Vector): Vector {
  const each = product(shape);
  const along = product(shape.slice(1));
  const steps = [[mean, (a: number, b: number) => a - b], [std, (a: number, b: number) => a / b]] as const;
  for (const [numbers, apply] of steps) {
    const singles = Float32Array.from(numbers);
    for (let i = 0; singles.length > 0 && i < values.length; i++) {
      values[i] = apply(values[i]!, singles[singles.length === 1 ? 0 : Math.floor((i % each) / along)]!);
    }
  }
  return values;
}

/** Look at every stored value once. */
export function checkInputs(name: string, stored: Stored, fit: InputFit, manifest: Manifest): void {
  const each = product(stored.shape.slice(1));
  const refuse = (at: number, why: string): never => {
    throw new DataError(`${name}: sample ${Math.floor(at / each)} has ${why}`);
  };
  if (fit.dtype === "float32") {
    if (!isFloat(stored.dtype)) return; // no integer is too large for a float
    for (let i = 0; i < stored.data.length; i++) {
      const found = value(stored.dtype, stored.data[i]!);
      if (!Number.isFinite(Math.fround(found))) refuse(i, `the value ${found}, the inputs of a model must be finite numbers`);
    }
    return;
  }
  const [lowest, highest] = range(fit.dtype, manifest.vocabulary);
  const what = manifest.vocabulary === undefined ? "the value" : "token id";
  for (let i = 0; i < stored.data.length; i++) {
    const found = stored.data[i]!;
    if (found < lowest || found > highest) {
      refuse(i, `${what} ${found}, the model '${manifest.name}' takes ${lowest} to ${highest}`);
    }
  }
}

/** Read a stored number, whatever its type. */
export function value(dtype: DType, raw: number | bigint): number {
  return dtype === "float16" ? fromHalf(raw as number) : Number(raw);
}

function range(dtype: DType, vocabulary: number | undefined): readonly [bigint, bigint] {
  if (vocabulary !== undefined) return [0n, BigInt(vocabulary) - 1n];
  const bits = dtype === "int32" ? 31n : 63n;
  return [-(1n << bits), (1n << bits) - 1n];
}

function channelsFirst(raw: Stored, shape: readonly number[]): Numbers {
  const [channels, height, width] = shape as [number, number, number];
  const area = height * width;
  const found = numbers(raw.dtype, raw.data.length);
  const each = channels * area;
  for (let i = 0; i < raw.data.length; i++) {
    const within = i % each;
    const to = i - within + (within % channels) * area + Math.floor(within / channels);
    found[to] = raw.data[i]!;
  }
  return found;
}
