/**
 * Move the weights that a layer's graph refers to: ONNX says where they lie in weights.safetensors, and here only the
 * bytes of the layer itself are in memory.
 *
 * ModelProto.graph = 7, GraphProto.initializer = 5, TensorProto.external_data = 13, an entry's key = 1 and value = 2.
 */
import type { Bytes } from "../federation/space.ts";
import { delimited, fields, joined, refuse, text, written } from "./protobuf.ts";

export const WEIGHTS_FILE = "weights.safetensors";
const GRAPH = 7;
const INITIALIZER = 5;
const EXTERNAL_DATA = 13;

/** Write the graph again with every offset smaller by `origin`; the data may lie in [origin, origin + length) only. */
export function moveExternalData(graph: Bytes, origin: number, length: number): Bytes {
  return rewrite(graph, GRAPH, (inner) =>
    rewrite(inner, INITIALIZER, (tensor) => {
      const entries = new Map<string, string>();
      rewrite(tensor, EXTERNAL_DATA, (entry) => (entries.set(...keyAndValue(entry)), entry));
      if (entries.size === 0) return tensor;
      const offset = Number(entries.get("offset") ?? "0") - origin;
      const size = Number(entries.get("length") ?? "-1");
      if (entries.get("location") !== WEIGHTS_FILE || !(offset >= 0 && size >= 0 && offset + size <= length)) {
        refuse("a layer's graph refers to data that is not the layer's own");
      }
      return rewrite(tensor, EXTERNAL_DATA, (entry) => {
        const [key] = keyAndValue(entry);
        return key === "offset" ? joined([written(1, key), written(2, String(offset))]) : entry;
      });
    }),
  );
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
