/**
 * Check the graphs that a coordinator sends before any of them sees a person's data, as edge_runtime/graph_check.py does.
 *
 * Outputs must be those of the manifest, shaped like their parameters, computed from the labels and summed over the
 * batch. This stops the blunt attack only: SECURITY.md says what it does not stop.
 */
import type { Boundary, Layer, Manifest } from "../federation/manifest.ts";
import { product, type Bytes } from "../federation/space.ts";
import { weightsHeader } from "../federation/wire.ts";
import { readGraph, type Node, type OnnxGraph, type OnnxTensor, type Shape, type Value } from "./onnx_file.ts";
import { refuse } from "./protobuf.ts";

// Operators that run code or read files of their author's choice, or need not end.
const FOREIGN = new Set("Loop ATen EPContext ExternalGradient PythonOp PythonOpGrad Snpe TritonOp YieldOp".split(" "));
const DTYPES: Readonly<Record<string, number>> = { float32: 1, int64: 7 }; // of TensorProto.DataType

// What a value carries: something of the batch, something of the labels, samples that were not added up.
const BATCH = 1;
const LABELS = 2;
const RAW = 4;
const SIZES = new Set(["Shape", "Size"]); // which carry nothing of what they measure
const ADDING_UP = new Set(
  (
    "MatMul Gemm Einsum Conv ConvTranspose ConvGrad LSTM GRU RNN CumSum ScatterElements ScatterND ReduceSum ReduceMean " +
    "ReduceSumSquare ReduceL1 ReduceL2 ReduceLogSum ReduceMax ReduceLogSumExp ReduceMin ReduceProd GlobalAveragePool " +
    "AveragePool BatchNormalization BatchNormInternal BatchNormalizationGrad LayerNormalizationGrad GatherGrad Softmax " +
    "LogSoftmax SoftmaxCrossEntropyLoss SoftmaxCrossEntropyLossGrad NegativeLogLikelihoodLoss ArgMax ArgMin"
  ).split(" "),
);

/** Refuse a training graph that gives other things than the loss, gradients and statistics. */
export function checkTrainingGraph(data: Bytes, manifest: Manifest, boundary: Boundary): void {
  const graph = read(data);
  const parameters = manifest.spaceOf(boundary).layers.slice(boundary.layer).flat();
  const first = manifest.entry(boundary);
  checkInputs(graph, new Map<string, Shape>([
    ["input", [undefined, ...first.shape]],
    ["labels", [undefined, ...manifest.labels.shape]],
    ["seed", []],
    ...parameters.map(({ name, shape }) => [name, shape] as const),
  ]));
  const results = new Map(parameters.map((p) => [p.name + (p.kind === "weight" ? ".grad" : ".new"), p]));
  checkOutputs(graph, "float32", new Map<string, Shape>([
    ["loss", []],
    ["predictions", [undefined, ...manifest.output.shape]],
    ...[...results].map(([name, { shape }]) => [name, shape] as const),
  ]));
  checkNothingOutside(graph);
  const carried = carriedBy(graph, new Map([["input", BATCH | RAW], ["labels", LABELS]]));
  for (const [name, { kind }] of results) {
    const what = carried(name)!;
    if (kind === "weight" && what & BATCH && !(what & LABELS)) refuse(`'${name}' is computed from the batch and not through the loss: no path from the labels`);
    if (what & RAW) refuse(`'${name}' is made of single samples, not of a sum over the batch`);
  }
  if (!(carried("loss")! & LABELS)) refuse("its loss does not depend on the labels");
}

/** Refuse a frozen layer that takes its weights from elsewhere than their own places in the weights file. */
export function checkForwardGraph(data: Bytes, manifest: Manifest, layer: Layer): void {
  const graph = read(data);
  checkInputs(graph, new Map([["input", [undefined, ...layer.input.shape]]]));
  checkOutputs(graph, layer.output.dtype, new Map([["output", [undefined, ...layer.output.shape]]]));
  const start = weightsHeader(manifest.space).length;
  const own = new Map(manifest.parametersOf(layer).map((p) => [p.name, p]));
  for (const tensor of graph.tensors) {
    const parameter = own.get(tensor.name);
    if (tensor.external === undefined) continue;
    const place = parameter && [`location=${manifest.weights.name}`, `offset=${start + 4 * manifest.space.sliceOf(parameter.name).start}`, `length=${4 * product(parameter.shape)}`];
    const said = [...tensor.external].map((entry) => entry.join("="));
    if (!place || tensor.shape.join() !== parameter.shape.join() || said.sort().join() !== place.sort().join()) {
      refuse(`'${tensor.name}' takes its values from another place than its own in the weights file`);
    }
  }
  checkNothingOutside(graph, new Set(own.keys()));
  carriedBy(graph, new Map([["input", BATCH]]));
}

function read(data: Bytes): OnnxGraph {
  const graph = readGraph(data);
  for (const { domain, operator } of allNodes(graph)) {
    if (!["", "ai.onnx"].includes(domain) || FOREIGN.has(operator)) refuse(`it has the operator ${domain || "ai.onnx"}::${operator}`);
  }
  return graph;
}

function* allNodes(graph: OnnxGraph): Iterable<Node> {
  for (const node of graph.nodes) {
    yield node;
    for (const inner of node.graphs) yield* allNodes(inner);
  }
}

function checkInputs(graph: OnnxGraph, known: ReadonlyMap<string, Shape>): void {
  for (const value of graph.inputs) {
    if (!fits(value, known.get(value.name))) refuse(`its input '${value.name}' is none that the manifest describes`);
  }
}

function checkOutputs(graph: OnnxGraph, dtype: string, expected: ReadonlyMap<string, Shape>): void {
  const names = new Set(graph.outputs.map(({ name }) => name));
  const wrong = [...names].find((name) => !expected.has(name)) ?? [...expected.keys()].find((name) => !names.has(name));
  if (wrong !== undefined || names.size !== graph.outputs.length) refuse(`its outputs are not those of the manifest: '${wrong}'`);
  for (const value of graph.outputs) {
    if (!fits(value, expected.get(value.name)) || (dtype in DTYPES && value.dtype !== DTYPES[dtype])) {
      refuse(`its output '${value.name}' is not shaped like what it is the result for`);
    }
  }
}

/** Whether a value is declared with this shape; where undefined is expected, any size of a batch. */
function fits({ shape }: Value, wanted: Shape | undefined): boolean {
  return shape !== undefined && shape.length === wanted?.length && wanted.every((length, at) => length === undefined || shape[at] === length);
}

function checkNothingOutside(graph: OnnxGraph, besides: ReadonlySet<string> = new Set()): void {
  const nodes = [...allNodes(graph)];
  const held: OnnxTensor[] = [
    ...nodes.flatMap((node) => [...node.tensors, ...node.graphs.flatMap((inner) => inner.tensors)]),
    ...graph.tensors.filter(({ name }) => !besides.has(name)),
  ];
  const outside = held.find(({ external }) => external !== undefined);
  if (outside !== undefined) refuse(`'${outside.name}' takes its values from another file`);
}

type Carried = (name: string) => number | undefined;

/** Follow what is computed from the batch and from the labels to every value of a graph. */
function carriedBy(graph: OnnxGraph, inputs: ReadonlyMap<string, number>, outer: Carried = () => undefined): Carried {
  const own = new Map<string, number>(graph.tensors.map(({ name }) => [name, 0]));
  for (const { name } of graph.inputs) own.set(name, inputs.get(name) ?? 0);
  const values: Carried = (name) => own.get(name) ?? outer(name);
  for (const node of graph.nodes) {
    let carried = 0;
    for (const name of node.inputs.filter(Boolean)) {
      carried |= values(name) ?? refuse(`${node.operator} takes '${name}', which nothing gives before`);
    }
    for (const inner of node.graphs) {
      const found = carriedBy(inner, new Map(inner.inputs.map(({ name }) => [name, carried])), values);
      for (const { name } of inner.outputs) carried |= found(name)!;
    }
    if (SIZES.has(node.operator)) carried = 0;
    else if (ADDING_UP.has(node.operator)) carried &= ~RAW;
    for (const name of node.outputs.filter(Boolean)) {
      if (own.has(name)) refuse(`${node.operator} gives '${name}', which is there already`);
      own.set(name, carried);
    }
  }
  for (const { name } of graph.outputs) {
    if (values(name) === undefined) refuse(`nothing gives its output '${name}'`);
  }
  return values;
}
