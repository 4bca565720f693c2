/** Whole rounds on onnxruntime-web: what a device sends is what the Python agent sends, within 1e-5. */
import { beforeAll, describe, expect, test } from "vitest";

import { inMemory } from "../src/edge_runtime/activations.ts";
import { Samples, type Dataset } from "../src/edge_runtime/data/samples.ts";
import type { FetchedLayer, LayerSource } from "../src/edge_runtime/forward.ts";
import { scoreReceived } from "../src/edge_runtime/evaluate.ts";
import { moveExternalData } from "../src/edge_runtime/graph_file.ts";
import { begin, finish } from "../src/edge_runtime/participant.ts";
import { Stopwatch } from "../src/edge_runtime/timing.ts";
import { Trainer } from "../src/edge_runtime/trainer.ts";
import type { ServerValues } from "../src/federation/device_task.ts";
import type { Manifest } from "../src/federation/manifest.ts";
import { decodeTask } from "../src/federation/messages.ts";
import { product, type Vector } from "../src/federation/space.ts";
import { MODEL, weightsHeader } from "../src/federation/wire.ts";
import { Bundle, floats, golden, loadForNode, pattern } from "./values.ts";

const SAMPLES = 13;
const TOLERANCE = 1e-5;
const known = golden("rounds.json");

function sampleArrays(manifest: Manifest): Dataset {
  const each = product(manifest.input.shape);
  const { vocabulary, loss } = manifest;
  const shape = [SAMPLES, ...manifest.input.shape];
  const tokens = (): BigInt64Array<ArrayBuffer> => BigInt64Array.from({ length: SAMPLES * each }, (_, i) => BigInt((i * 7) % vocabulary!));
  const classes = loss.name === "cross_entropy" ? manifest.output.shape[0]! : 2;
  const numbers = Float64Array.from({ length: SAMPLES }, (_, i) => (i * 5) % classes);
  return {
    name: "data",
    inputs: vocabulary ? { dtype: "int64", shape, data: tokens() } : { dtype: "float32", shape, data: pattern(SAMPLES * each, 1, 2) },
    labels:
      loss.name === "mse"
        ? { dtype: "float32", shape: [SAMPLES, ...manifest.labels.shape], data: pattern(SAMPLES * product(manifest.labels.shape), 2) }
        : { dtype: "float64", shape: [SAMPLES], data: numbers },
  };
}

function sourceOf(bundle: Bundle): LayerSource {
  const { manifest } = bundle;
  const start = weightsHeader(manifest.space).length;
  const weights = bundle.file("weights.safetensors");
  return {
    manifest,
    lineage: "golden",
    version: "0",
    async fetch(layer): Promise<FetchedLayer> {
      const where = manifest.space.around(layer.parameters);
      const [from, to] = [start + 4 * where.start, start + 4 * where.stop];
      const graph = bundle.file(layer.forward.name);
      return { graph: moveExternalData(graph, [{ start: from, stop: to }]), weights: weights.slice(from, to) };
    },
  };
}

function weightsOf(bundle: Bundle): Vector {
  return new Float32Array(bundle.file("weights.safetensors").slice(weightsHeader(bundle.manifest.space).length).buffer);
}

beforeAll(loadForNode);

test("a session that stays takes batches of any size, and the same task gives the same again", async () => {
  const expected = known["cnn weak"];
  const bundle = new Bundle(expected.bundle);
  const samples = new Samples(sampleArrays(bundle.manifest), bundle.manifest);
  const trainer = new Trainer(sourceOf(bundle), samples, async (boundary) => bundle.file(boundary.train!.name), { batch: 5, memory: 1e9, makeRoom: inMemory });
  const server = { model: async (part) => part.region.gather(weightsOf(bundle)).slice() } as ServerValues;
  const sent: number[][] = [];
  for (const batch of [4, 3, 4]) {
    const task = decodeTask({ ...expected.task, batch });
    const begun = await begin(task, bundle.manifest, server, async () => undefined);
    sent.push([...finish(begun, await trainer.run(task, begun.received)).tracks.get(MODEL)![1]]);
  }
  await trainer.close();
  expect(sent[2]).toEqual(sent[0]);
  expect(sent[1]).not.toEqual(sent[0]);
});

describe("rounds", () => {
  test.each(Object.entries<any>(known))("%s", async (_, expected) => {
    const bundle = new Bundle(expected.bundle);
    const { manifest } = bundle;
    const task = decodeTask(expected.task);
    const server = { model: async (part) => part.region.gather(weightsOf(bundle)).slice() } as ServerValues;
    const trainer = new Trainer(
      sourceOf(bundle),
      new Samples(sampleArrays(manifest), manifest),
      async (boundary) => bundle.file(boundary.train!.name),
      { batch: 5, memory: 1e9, makeRoom: inMemory },
    );
    const plan = { batch: 5, memory: 1, makeRoom: inMemory }; // one layer at a time
    const scored = await scoreReceived(sourceOf(bundle), new Samples(sampleArrays(manifest), manifest), plan, new Stopwatch(), () => {});
    expect(scored.correct).toBe(expected.score.correct);
    expect(Math.abs(scored.loss - expected.score.loss)).toBeLessThan(100 * TOLERANCE); // a sum
    const begun = await begin(task, manifest, server, async () => undefined);
    const outcome = await trainer.run(task, begun.received);
    const [, update] = finish(begun, outcome).tracks.get(MODEL)!;
    await trainer.close();
    const right = floats(expected.update);
    expect(update.length).toBe(right.length);
    const difference = update.reduce((most, value, at) => Math.max(most, Math.abs(value - right[at]!)), 0);
    expect(difference).toBeLessThan(TOLERANCE);
    expect(right.reduce((most, value) => Math.max(most, Math.abs(value)), 0)).toBeGreaterThan(100 * TOLERANCE);
    expect(outcome.report.steps).toBe(expected.steps);
    expect(Math.abs(outcome.report.loss! - expected.loss)).toBeLessThan(TOLERANCE);
    expect(Math.abs(outcome.report.last_loss! - expected.last_loss)).toBeLessThan(TOLERANCE);
  });
});
