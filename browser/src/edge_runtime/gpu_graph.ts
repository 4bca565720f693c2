/**
 * Write a training graph again as WebGPU takes it: batch norm in training mode, which that provider refuses, as the operators that
 * it is made of. The graphs of a bundle keep the operator, which is faster on processors.
 *
 * ModelProto.graph = 7; GraphProto.node = 1, .initializer = 5; NodeProto.input = 1, .output = 2, .op_type = 4,
 * .attribute = 5; AttributeProto.name = 1, .f = 2, .i = 3, .type = 20; TensorProto.dims = 1, .data_type = 2, .name = 8, .raw_data = 9.
 */
import type { Bytes } from "../federation/space.ts";
import { delimited, fields, joined, number, part, text, written } from "./protobuf.ts";

const INT = 2; // AttributeProto.type
const DTYPES = { float32: 1, int64: 7 } as const;

interface Node {
  readonly operator: string;
  readonly inputs: readonly string[];
  readonly outputs: readonly string[];
  readonly numbers: ReadonlyMap<string, number>; // attributes that are one
}

export function forGpu(graph: Bytes): Bytes {
  return changed(graph, 7, (inner) => {
    const constants = new Map<string, Bytes>();
    const nodes = changed(inner, 1, (bytes) => {
      const node = read(bytes);
      return isTrainingNorm(node) ? decomposed(node, constants) : delimited(1, bytes);
    });
    return delimited(7, joined([nodes, ...[...constants.values()].map((tensor) => delimited(5, tensor))]));
  });
}

/** Momentum 0: the outputs behind the first are the batch's own statistics. */
function isTrainingNorm({ operator, numbers, outputs }: Node): boolean {
  return operator === "BatchNormalization" && numbers.get("training_mode") === 1 && numbers.get("momentum") === 0 && outputs.length === 3;
}

function decomposed({ inputs, outputs, numbers }: Node, constants: Map<string, Bytes>): Bytes {
  const [x, scale, bias] = inputs as [string, string, string];
  const [y, mean, variance] = outputs as [string, string, string];
  const epsilon = numbers.get("epsilon") ?? 1e-5;
  const nodes: Bytes[] = [];
  const op = (operator: string, from: readonly string[], to: string, ...attributes: Bytes[]): string => {
    nodes.push(delimited(1, joined([...from.map((name) => written(1, name)), written(2, to), written(4, operator), ...attributes])));
    return to;
  };
  const own = (name: string): string => `${y}.parts.${name}`;
  const integers = (name: string, ...values: number[]): string => constant(constants, `parts.${name}`, "int64", BigInt64Array.from(values.map(BigInt)), [values.length]);
  const axes = integers("axes", 0, 2);
  const perChannel = integers("channel", 1, -1, 1);
  const keep = delimited(5, joined([written(1, "keepdims"), number(3, 1), number(20, INT)]));
  const flat = op("Reshape", [x, integers("rows", 0, 0, -1)], own("x")); // [N, channels, all the rest]
  const middle = op("ReduceMean", [flat, axes], own("mean"), keep);
  const centred = op("Sub", [flat, middle], own("centred"));
  const spread = op("ReduceMean", [op("Mul", [centred, centred], own("square")), axes], own("variance"), keep);
  const least = constant(constants, `parts.epsilon.${epsilon}`, "float32", Float32Array.of(epsilon), []);
  const deviation = op("Sqrt", [op("Add", [spread, least], own("sum"))], own("deviation"));
  const slope = op("Div", [op("Reshape", [scale, perChannel], own("scale")), deviation], own("slope"));
  const level = op("Reshape", [bias, perChannel], own("bias"));
  const result = op("Add", [op("Mul", [centred, slope], own("scaled")), level], own("result"));
  op("Reshape", [result, op("Shape", [x], own("shape"))], y);
  op("Reshape", [middle, integers("vector", -1)], mean);
  op("Reshape", [spread, integers("vector", -1)], variance);
  return joined(nodes);
}

function constant(known: Map<string, Bytes>, name: string, dtype: keyof typeof DTYPES, data: BigInt64Array | Float32Array, shape: readonly number[]): string {
  const values = new Uint8Array(data.buffer as ArrayBuffer);
  known.set(name, joined([...shape.map((length) => number(1, length)), number(2, DTYPES[dtype]), written(8, name), delimited(9, values)]));
  return name;
}

function read(bytes: Bytes): Node {
  const found = { operator: "", inputs: [] as string[], outputs: [] as string[], numbers: new Map<string, number>() };
  for (const field of fields(bytes)) {
    if (field.number === 1) found.inputs.push(text(field.value));
    else if (field.number === 2) found.outputs.push(text(field.value));
    else if (field.number === 4) found.operator = text(field.value);
    else if (field.number === 5) {
      let [name, value] = ["", 0];
      for (const { number: which, value: held } of fields(part(field.value))) {
        if (which === 1) name = text(held);
        else if (which === 2 && typeof held !== "number") value = new DataView(held.buffer, held.byteOffset, 4).getFloat32(0, true);
        else if (which === 3 && typeof held === "number") value = held;
      }
      found.numbers.set(name, value);
    }
  }
  return found;
}

/** Write a message again, with every part of one field as `change` writes it. */
function changed(message: Bytes, field: number, change: (inner: Bytes) => Bytes): Bytes {
  return joined([...fields(message)].map(({ number: which, whole, value }) => (which === field ? change(part(value)) : whole)));
}
