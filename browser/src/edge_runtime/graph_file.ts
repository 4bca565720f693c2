/**
 * Move the weights that a layer's graph refers to: ONNX says where they lie in weights.safetensors, and here only the
 * bytes that it uses are in memory.
 *
 * ModelProto.graph = 7, GraphProto.initializer = 5, TensorProto.external_data = 13, an entry's key = 1 and value = 2.
 */
import type { Bytes, Slice } from "../federation/space.ts";
import { delimited, fields, joined, refuse, text, written } from "./protobuf.ts";

export const WEIGHTS_FILE = "weights.safetensors";
const GRAPH = 7;
const INITIALIZER = 5;
const EXTERNAL_DATA = 13;

/** Write the graph again for data that consists of these parts of the weights file, one behind the other. */
export function moveExternalData(graph: Bytes, parts: readonly Slice[]): Bytes {
  return rewrite(graph, GRAPH, (inner) =>
    rewrite(inner, INITIALIZER, (tensor) => {
      const entries = new Map<string, string>();
      rewrite(tensor, EXTERNAL_DATA, (entry) => (entries.set(...keyAndValue(entry)), entry));
      if (entries.size === 0) return tensor;
      const offset = placeIn(parts, Number(entries.get("offset") ?? "0"), Number(entries.get("length") ?? "-1"));
      if (entries.get("location") !== WEIGHTS_FILE || offset === undefined) refuse("a layer's graph refers to data that it does not use");
      return rewrite(tensor, EXTERNAL_DATA, (entry) => {
        const [key] = keyAndValue(entry);
        return key === "offset" ? joined([written(1, key), written(2, String(offset))]) : entry;
      });
    }),
  );
}

/** Where in the data a range of the file lies; undefined if it is in none of the parts. */
function placeIn(parts: readonly Slice[], start: number, size: number): number | undefined {
  let before = 0;
  for (const part of parts) {
    if (size >= 0 && start >= part.start && start + size <= part.stop) return before + start - part.start;
    before += part.stop - part.start;
  }
  return undefined;
}

/** Replace the messages of one field; everything else stays as it is. */
function rewrite(message: Bytes, field: number, change: (inner: Bytes) => Bytes): Bytes {
  const parts: Bytes[] = [];
  for (const { number, whole, value } of fields(message)) {
    parts.push(number === field && typeof value !== "number" ? delimited(field, change(value)) : whole);
  }
  return joined(parts);
}

function keyAndValue(entry: Bytes): [string, string] {
  const found = ["", "", ""];
  for (const { number, value } of fields(entry)) {
    if (number <= 2) found[number] = text(value);
  }
  return [found[1]!, found[2]!];
}
