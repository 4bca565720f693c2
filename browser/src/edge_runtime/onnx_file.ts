/**
 * Read the structure of an ONNX file: nodes, inputs, outputs, initialisers. Values of tensors are not read.
 *
 * Protobuf merges a message that is there twice, and of fields that exclude each other the last one counts. No exporter
 * writes such a file, so it is refused: what is checked here is what ONNX Runtime runs.
 */
import type { Bytes } from "../federation/space.ts";
import { fields, part, refuse, text, varint } from "./protobuf.ts";

const MOST_BYTES = 64 * 2 ** 20; // of a graph; weights lie beside it
const MOST_ITEMS = 2 ** 20; // nodes, names, tensors, attributes and dimensions of a file together
const MOST_NESTING = 8; // graphs inside of graphs
// Fields of which a message has at most one, of onnx.proto3.
const GRAPH_OF_MODEL = [7];
const OF_ATTRIBUTE = [5, 6]; // t, g
const TYPE_OF_VALUE = [2];
const KINDS_OF_TYPE = [1, 4, 5, 7, 8, 9]; // tensor_type, sequence_type, ...
const SHAPE_OF_TENSOR = [2];
const OF_DIMENSION = [1, 2]; // dim_value, dim_param

export type Shape = readonly (number | undefined)[]; // undefined: a dimension with a name, such as the batch

export interface Value {
  readonly name: string;
  readonly dtype: number;
  readonly shape: Shape | undefined;
}

/** An initialiser; `external` says where its bytes are, if they are not in the file. */
export interface OnnxTensor {
  readonly name: string;
  readonly shape: readonly number[];
  readonly external: ReadonlyMap<string, string> | undefined;
}

export interface Node {
  readonly operator: string;
  readonly domain: string;
  readonly inputs: readonly string[];
  readonly outputs: readonly string[];
  readonly tensors: readonly OnnxTensor[];
  readonly graphs: readonly OnnxGraph[];
}

export interface OnnxGraph {
  readonly nodes: readonly Node[];
  readonly inputs: readonly Value[];
  readonly outputs: readonly Value[];
  readonly tensors: readonly OnnxTensor[];
}

/** Parse a file that has a graph and nothing else that could run. */
export function readGraph(data: Bytes): OnnxGraph {
  if (data.length > MOST_BYTES) refuse(`a graph of ${data.length} bytes; expected at most ${MOST_BYTES}`);
  return new Reader().model(data);
}

/** Reads messages and counts what it makes. */
class Reader {
  private left = MOST_ITEMS;

  model(data: Bytes): OnnxGraph {
    let graph: OnnxGraph | undefined;
    for (const { number, value } of this.fields(data, GRAPH_OF_MODEL)) {
      if (number === 7) graph = this.graph(part(value), 0);
      if (number === 20 || number === 25) refuse(`it has ${number === 20 ? "training information" : "functions"}`);
    }
    return graph ?? refuse("there is none in the file");
  }

  private graph(data: Bytes, depth: number): OnnxGraph {
    if (depth > MOST_NESTING) refuse(`graphs inside of graphs more than ${MOST_NESTING} deep`);
    const found = { nodes: [] as Node[], inputs: [] as Value[], outputs: [] as Value[], tensors: [] as OnnxTensor[] };
    for (const { number, value } of this.fields(data)) {
      if (number === 1) found.nodes.push(this.node(part(value), depth));
      else if (number === 5) found.tensors.push(this.tensor(part(value)));
      else if (number === 11) found.inputs.push(this.value(part(value)));
      else if (number === 12) found.outputs.push(this.value(part(value)));
      else if (number === 15) refuse("sparse initialisers");
    }
    return found;
  }

  private node(data: Bytes, depth: number): Node {
    const found = { operator: "", domain: "", inputs: [] as string[], outputs: [] as string[], tensors: [] as OnnxTensor[], graphs: [] as OnnxGraph[] };
    for (const { number, value } of this.fields(data)) {
      if (number === 1) found.inputs.push(text(value));
      else if (number === 2) found.outputs.push(text(value));
      else if (number === 4) found.operator = text(value);
      else if (number === 7) found.domain = text(value);
      else if (number === 5) {
        for (const { number: kind, value: held } of this.fields(part(value), OF_ATTRIBUTE)) {
          if (kind === 5 || kind === 10) found.tensors.push(this.tensor(part(held)));
          else if (kind === 6 || kind === 11) found.graphs.push(this.graph(part(held), depth + 1));
          else if (kind === 22 || kind === 23) refuse("sparse constants");
        }
      }
    }
    return found;
  }

  private tensor(data: Bytes): OnnxTensor {
    let [name, isExternal] = ["", false];
    const external = new Map<string, string>();
    const shape: number[] = [];
    for (const { number, value } of this.fields(data)) {
      if (number === 1) shape.push(...(typeof value === "number" ? [value] : this.packed(value)));
      else if (number === 8) name = text(value);
      else if (number === 14) isExternal ||= value !== 0;
      else if (number === 13) {
        const entry = new Map([...this.fields(part(value))].map((field) => [field.number, text(field.value)]));
        external.set(entry.get(1) ?? "", entry.get(2) ?? "");
        isExternal = true;
      }
    }
    return { name, shape, external: isExternal ? external : undefined };
  }

  private value(data: Bytes): Value {
    let found: Value = { name: "", dtype: 0, shape: undefined };
    for (const { number, value } of this.fields(data, TYPE_OF_VALUE)) {
      if (number === 1) found = { ...found, name: text(value) };
      if (number !== 2) continue;
      for (const { number: kind, value: described } of this.fields(part(value), KINDS_OF_TYPE)) {
        if (kind === 1) found = { ...found, ...this.tensorType(part(described)) };
      }
    }
    return found;
  }

  private tensorType(data: Bytes): Pick<Value, "dtype" | "shape"> {
    let found: Pick<Value, "dtype" | "shape"> = { dtype: 0, shape: undefined };
    for (const { number, value } of this.fields(data, SHAPE_OF_TENSOR)) {
      if (number === 1 && typeof value === "number") found = { ...found, dtype: value };
      if (number === 2) found = { ...found, shape: [...this.fields(part(value))].filter((dim) => dim.number === 1).map((dim) => this.dimension(part(dim.value))) };
    }
    return found;
  }

  private dimension(data: Bytes): number | undefined {
    const found = [...this.fields(data, OF_DIMENSION)].findLast(({ number }) => number === 1)?.value;
    return typeof found === "number" ? found : undefined;
  }

  private packed(data: Bytes): number[] {
    const found: number[] = [];
    for (let at = 0; at < data.length; ) {
      this.count();
      let number: number;
      [number, at] = varint(data, at);
      found.push(number);
    }
    return found;
  }

  /** At most one of the single ones is there; fields of a fixed width are left out, as protobuf does: none is read. */
  private *fields(data: Bytes, single: readonly number[] = []): Iterable<{ number: number; value: number | Bytes }> {
    let met = 0;
    for (const field of fields(data)) {
      this.count();
      if (single.includes(field.number) && ++met > 1) refuse(`field ${field.number} of a part that can have it once is there again`);
      if (field.kind === 0 || field.kind === 2) yield field;
    }
  }

  private count(): void {
    if (--this.left < 0) refuse(`more than ${MOST_ITEMS} parts`);
  }
}
