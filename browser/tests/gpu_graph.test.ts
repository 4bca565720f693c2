/** Graphs as WebGPU takes them: no batch norm in training mode, and the same numbers. */
import { beforeAll, expect, test } from "vitest";

import { forGpu } from "../src/edge_runtime/gpu_graph.ts";
import { readGraph } from "../src/edge_runtime/onnx_file.ts";
import { TrainingStep } from "../src/edge_runtime/step.ts";
import { product } from "../src/federation/space.ts";
import { Bundle, loadForNode, pattern } from "./values.ts";

const operators = (graph: Uint8Array<ArrayBuffer>): string[] => readGraph(graph).nodes.map(({ operator }) => operator);

beforeAll(loadForNode);

async function gradients(bundle: Bundle, graph: Uint8Array<ArrayBuffer>): Promise<{ loss: number; gradients: Float32Array }> {
  const { manifest } = bundle;
  const boundary = manifest.boundaries[0]!;
  const step = await TrainingStep.open(graph, manifest.spaceOf(boundary), boundary.layer, manifest.input, manifest.labels);
  step.parameters.set(pattern(step.parameters.length, 3));
  const batch = { size: 4, inputs: pattern(4 * product(manifest.input.shape), 1, 2), labels: BigInt64Array.of(0n, 1n, 2n, 1n) };
  const loss = await step.run(batch, 1);
  const found = step.gradients.slice();
  await step.release();
  return { loss, gradients: found };
}

test("batch norm in training mode is written as its parts, which give the same", async () => {
  const bundle = new Bundle("depthwise");
  const graph = bundle.file(bundle.manifest.boundaries[0]!.train!.name);
  const norms = (bytes: Uint8Array<ArrayBuffer>): number => operators(bytes).filter((each) => each === "BatchNormalization").length;
  const written = forGpu(graph);
  expect(norms(graph) - norms(written)).toBe(3); // those of the forward pass; the gradient's are not in training mode
  const [right, found] = [await gradients(bundle, graph), await gradients(bundle, written)];
  expect(Math.abs(found.loss - right.loss)).toBeLessThan(1e-6);
  found.gradients.forEach((value, at) => expect(Math.abs(value - right.gradients[at]!)).toBeLessThan(1e-5));
  expect(right.gradients.some((value) => Math.abs(value) > 1e-2)).toBe(true);
});

test("a graph without it stays as it is, byte for byte", () => {
  const bundle = new Bundle("cnn");
  const graph = bundle.file(bundle.manifest.boundaries[0]!.train!.name);
  expect(forGpu(graph)).toEqual(graph);
});
