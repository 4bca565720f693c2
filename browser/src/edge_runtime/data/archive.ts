/** .npz files: arrays in a zip file, read into memory. Nothing in them is run. */
import { unzipSync } from "fflate";

import { DataError, messageOf } from "../../federation/errors.ts";
import { product, type Bytes } from "../../federation/space.ts";
import { itemSize, numbers, type DType, type Stored } from "./arrays.ts";
import type { Dataset } from "./samples.ts";

const PAIRS = [["x", "y"], ["x_train", "y_train"], ["data", "target"], ["images", "labels"]] as const; // the first that is there
const MOST_BYTES = 2 ** 31; // of one array
const TYPES: Readonly<Record<string, DType>> = {
  "|b1": "bool", "|u1": "uint8", "|i1": "int8", "<u2": "uint16", "<i2": "int16", "<u4": "uint32", "<i4": "int32",
  "<u8": "uint64", "<i8": "int64", "<f2": "float16", "<f4": "float32", "<f8": "float64",
};

/** Read inputs and labels. */
export function readArchive(file: Bytes, name: string): Dataset {
  const names: string[] = [];
  let members: Record<string, Uint8Array>;
  try {
    unzipSync(file, { filter: (member) => names.push(member.name) === 0 }); // lists them, and unpacks none
    const pair = PAIRS.find((pair) => pair.every((key) => names.includes(`${key}.npy`)));
    if (pair === undefined) {
      const found = names.map((each) => each.replace(/\.npy$/, "")).join(", ").slice(0, 200);
      throw new DataError(`${name}: expected arrays named x and y (or ${PAIRS.slice(1).map((p) => p.join(" and ")).join(", ")}), found ${found || "none"}`);
    }
    const wanted = pair.map((key) => `${key}.npy`);
    members = unzipSync(file, { filter: (member) => wanted.includes(member.name) && within(member.originalSize, name) });
    const [inputs, labels] = wanted.map((key) => readArray(members[key]!, `${name}: ${key.slice(0, -4)}`));
    return { name, inputs: inputs!, labels: labels! };
  } catch (error) {
    if (error instanceof DataError) throw error;
    throw new DataError(`${name} is no .npz file that can be read: ${messageOf(error)}`);
  }
}

function within(size: number, name: string): boolean {
  if (size > MOST_BYTES) throw new DataError(`${name}: an array has ${size} bytes; expected at most ${MOST_BYTES}`);
  return true;
}

/** Read an array in numpy's own format. */
export function readArray(bytes: Uint8Array, what: string): Stored {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (bytes.length < 12 || String.fromCharCode(...bytes.subarray(1, 6)) !== "NUMPY" || ![1, 2].includes(bytes[6]!)) {
    throw new DataError(`${what} is no array`);
  }
  const [prefix, length] = bytes[6] === 1 ? [10, view.getUint16(8, true)] : [12, view.getUint32(8, true)];
  const header = new TextDecoder("latin1").decode(bytes.subarray(prefix, prefix + length));
  const descr = /'descr':\s*'([^']*)'/.exec(header)?.[1] ?? "?";
  const shapeSaid = /'shape':\s*\(([\d,\s]*)\)/.exec(header)?.[1];
  const dtype = Object.hasOwn(TYPES, descr) ? TYPES[descr]! : undefined;
  if (dtype === undefined || shapeSaid === undefined) {
    throw new DataError(`${what} has the type ${descr.slice(0, 40)}; expected plain little-endian numbers`);
  }
  if (/'fortran_order':\s*True/.test(header)) {
    throw new DataError(`${what} is stored column by column; save numpy.ascontiguousarray of it`);
  }
  const shape = shapeSaid.split(",").filter((part) => part.trim()).map(Number);
  const data = bytes.slice(prefix + length);
  if (product(shape) * itemSize(dtype) !== data.length) {
    throw new DataError(`${what} says it is ${dtype} ${shape.join("×")}, but it has ${data.length} bytes`);
  }
  return { dtype, shape, data: numbers(dtype, data.buffer) };
}
