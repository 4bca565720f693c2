/** The fields of a protobuf message, read and written. Every bound is checked, so a hostile file costs no more than its own size. */
import { EmbraceError } from "../federation/errors.ts";
import type { Bytes } from "../federation/space.ts";

const NO_MESSAGE = "it is no ONNX file, or a part of one";
const LENGTH_DELIMITED = 2;
const WIDTHS: Readonly<Record<number, number>> = { 1: 8, 5: 4 };

/** A graph that does other things than training, or is none. */
export class UnsafeGraph extends EmbraceError {
  override readonly reason = "unsafe_graph";
}

export function refuse(why: string): never {
  throw new UnsafeGraph(`the graph is refused: ${why}`);
}

/** A field: a number, or the bytes of a text or a message; `whole` has its number and length in front. */
export interface ProtoField {
  readonly number: number;
  readonly kind: number; // 0 a number, 2 bytes; 1 and 5 numbers of a fixed width
  readonly value: number | Bytes;
  readonly whole: Bytes;
}

export function* fields(message: Bytes): Generator<ProtoField> {
  for (let at = 0; at < message.length; ) {
    const start = at;
    let key: number;
    [key, at] = varint(message, at);
    if (key >= 2 ** 32) refuse(NO_MESSAGE); // of which a reader may take the last 32 bits
    const [number, kind] = [Math.floor(key / 8), key % 8];
    if (kind === 0) {
      let value: number;
      [value, at] = varint(message, at);
      yield { number, kind, value, whole: message.subarray(start, at) };
      continue;
    }
    let size = WIDTHS[kind];
    if (kind === 2) [size, at] = varint(message, at);
    if (size === undefined || size > message.length - at) refuse(NO_MESSAGE);
    const value = message.subarray(at, at + size);
    at += size;
    yield { number, kind, value, whole: message.subarray(start, at) };
  }
}

export function varint(message: Bytes, from: number): [number, number] {
  let value = 0;
  for (let at = from; at < Math.min(from + 10, message.length); at++) {
    value += (message[at]! & 0x7f) * 2 ** (7 * (at - from));
    if (message[at]! < 0x80) return [value, at + 1];
  }
  return refuse(NO_MESSAGE);
}

export function part(value: number | Bytes): Bytes {
  return typeof value === "number" ? refuse(NO_MESSAGE) : value;
}

const UTF8 = new TextDecoder("utf-8", { fatal: true });

export function text(value: number | Bytes): string {
  try {
    return UTF8.decode(part(value));
  } catch (error) {
    if (error instanceof UnsafeGraph) throw error;
    return refuse("a name that is no text");
  }
}

/** Write a field that is a number. */
export function number(field: number, value: number): Bytes {
  return Uint8Array.from([...digits(field * 8), ...digits(value)]);
}

/** Write a field that is a text. */
export function written(field: number, content: string): Bytes {
  return delimited(field, new TextEncoder().encode(content));
}

/** Write a field that is a message, or bytes. */
export function delimited(field: number, content: Bytes): Bytes {
  return joined([Uint8Array.from([...digits(field * 8 + LENGTH_DELIMITED), ...digits(content.length)]), content]);
}

export function joined(parts: readonly Bytes[]): Bytes {
  const found = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let done = 0;
  for (const part of parts) {
    found.set(part, done);
    done += part.length;
  }
  return found;
}

function digits(value: number): number[] {
  const found: number[] = [];
  for (; value >= 0x80; value = Math.floor(value / 0x80)) found.push((value % 0x80) | 0x80);
  return [...found, value];
}
