/**
 * The body of an update, or of a part of the weights: safetensors with the pieces of one or more regions.
 *
 * `model` stands under the parameters' own names, other tracks as TRACK/NAME. See docs/reference/wire.md.
 */
import { InputError } from "./errors.ts";
import type { Region } from "./region.ts";
import { decodeHeader, encodeHeader, PREFIX, type Tensor } from "./safetensors.ts";
import { ParameterSpace, product, type Bytes, type Vector } from "./space.ts";

export const MODEL = "model"; // the track of the weights themselves
const ALIGNMENT = 64;
const MOST_HEADER_BYTES = 1 << 20;

/** Write everything in front of the data of a weights file. */
export function weightsHeader(space: ParameterSpace): Bytes {
  return encodeHeader(space, ALIGNMENT);
}

/** Write a body; the vectors have the regions' elements in order. */
export function encode(tracks: ReadonlyMap<string, readonly [Region, Vector]>): Bytes {
  for (const [track, [region, vector]] of tracks) {
    if (vector.length !== region.size) {
      throw new InputError(`${track}: expected ${region.size} values, got ${vector.length}`);
    }
  }
  const header = encodeHeader([...tracks].flatMap(([track, [region]]) => tensorsOf(track, region)), ALIGNMENT);
  const size = [...tracks.values()].reduce((sum, [region]) => sum + 4 * region.size, header.length);
  const body = new Uint8Array(size);
  body.set(header);
  let done = header.length;
  for (const [, vector] of tracks.values()) {
    body.set(new Uint8Array(vector.buffer, vector.byteOffset, vector.byteLength), done);
    done += vector.byteLength;
  }
  return body;
}

/** Read the first vector of a body that has these tracks, after every check. */
export function decodeFirst(tracks: ReadonlyMap<string, Region>, body: Bytes): Vector {
  const view = new DataView(body.buffer, body.byteOffset, body.byteLength);
  const length = body.length >= PREFIX ? Number(view.getBigUint64(0, true)) : 0;
  if (length < 2 || length > MOST_HEADER_BYTES || PREFIX + length > body.length) {
    throw new InputError(`the header is said to have ${length} bytes; expected from 2 to ${MOST_HEADER_BYTES}`);
  }
  const tensors = [...tracks].flatMap(([track, region]) => tensorsOf(track, region));
  const offsets = decodeHeader(body.subarray(PREFIX, PREFIX + length), tensors);
  const start = PREFIX + length;
  const size = tensors.reduce((sum, tensor) => sum + 4 * product(tensor.shape), 0);
  if (body.length !== start + size) throw new InputError(`${body.length - start} bytes of data; expected ${size}`);
  const [first] = tracks;
  const [track, region] = first!;
  const found = new Float32Array(region.size);
  const target = new Uint8Array(found.buffer);
  let done = 0;
  for (const tensor of tensorsOf(track, region)) {
    const from = start + offsets.get(tensor.name)!;
    const bytes = 4 * product(tensor.shape);
    target.set(body.subarray(from, from + bytes), done);
    done += bytes;
  }
  checkFinite(track, found);
  return found;
}

/** Refuse values that are no numbers. */
export function checkFinite(what: string, vector: Vector): void {
  const at = vector.findIndex((value) => !Number.isFinite(value));
  if (at >= 0) throw new InputError(`'${what}': element ${at} is ${vector[at]}; expected finite values`);
}

function tensorsOf(track: string, region: Region): Tensor[] {
  const prefix = track === MODEL ? "" : `${track}/`;
  return [...region.space].map(({ name, shape }) => ({ name: prefix + name, shape }));
}
