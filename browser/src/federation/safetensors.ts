/**
 * Write and read the header of a safetensors file, as federation/safetensors_codec.py does.
 *
 *     8 bytes   length of the header, little-endian
 *     header    JSON: name -> {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, blanks at its end
 *     data      little-endian float32, one tensor behind the other; offsets are bytes and count from here
 */
import { InputError } from "./errors.ts";
import { product, type Bytes } from "./space.ts";

export const PREFIX = 8; // bytes in front of the header
const NOTES = "__metadata__";

export interface Tensor {
  readonly name: string;
  readonly shape: readonly number[];
}

/** Write everything in front of the data: the length, then JSON padded to a multiple of `alignment` bytes. */
export function encodeHeader(tensors: Iterable<Tensor>, alignment: number): Bytes {
  let end = 0;
  const entries: string[] = []; // not an object: JavaScript would put names like "0" first
  for (const { name, shape } of tensors) {
    const begin = end;
    end += 4 * product(shape);
    entries.push(`${ascii(name)}:{"dtype":"F32","shape":[${shape}],"data_offsets":[${begin},${end}]}`);
  }
  const text = `{${entries.join(",")}}`;
  const length = Math.ceil((PREFIX + text.length) / alignment) * alignment - PREFIX;
  const found = new Uint8Array(PREFIX + length);
  new DataView(found.buffer).setBigUint64(0, BigInt(length), true);
  found.set(new TextEncoder().encode(text.padEnd(length)), PREFIX);
  return found;
}

/** Read a header: where each of these tensors begins in the data, in bytes. They have to be all, without holes. */
export function decodeHeader(text: Bytes, tensors: Iterable<Tensor>): Map<string, number> {
  const entries = parse(text);
  const offsets = new Map<string, number>();
  const expected = [...tensors].map((tensor) => ({ tensor, begin: beginOf(entries, tensor.name) }));
  if (Object.keys(entries).filter((name) => name !== NOTES).length !== expected.length) {
    throw new InputError("the header has names that are not expected");
  }
  expected.sort((a, b) => a.begin - b.begin || product(a.tensor.shape) - product(b.tensor.shape));
  let end = 0;
  for (const { tensor } of expected) {
    const begin = end;
    end += 4 * product(tensor.shape);
    const right = JSON.stringify({ dtype: "F32", shape: tensor.shape, data_offsets: [begin, end] });
    const entry = entries[tensor.name] as Record<string, unknown>;
    const said = JSON.stringify({ dtype: entry.dtype, shape: entry.shape, data_offsets: entry.data_offsets });
    if (said !== right) throw new InputError(`'${tensor.name}' is described as ${said.slice(0, 200)}; expected ${right}`);
    offsets.set(tensor.name, begin);
  }
  return offsets;
}

function parse(text: Bytes): Record<string, unknown> {
  try {
    const found: unknown = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(text));
    if (typeof found === "object" && found !== null && !Array.isArray(found)) return found as Record<string, unknown>;
  } catch {
    // said below
  }
  throw new InputError("the header is no JSON object");
}

function beginOf(entries: Record<string, unknown>, name: string): number {
  const entry = Object.hasOwn(entries, name) ? (entries[name] as { data_offsets?: unknown } | null) : undefined;
  const begin = Array.isArray(entry?.data_offsets) ? (entry.data_offsets[0] as unknown) : undefined;
  if (typeof begin !== "number") throw new InputError(`the header lacks the name '${name}' or its data_offsets`);
  return begin;
}

/** Quote as Python's json does: everything outside ASCII is escaped. */
function ascii(name: string): string {
  const escape = (letter: string): string => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return JSON.stringify(name).replace(/[\u007f-\uffff]/g, escape);
}
