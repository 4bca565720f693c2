/** Orders, seeds, pictures, local rules, sync plans, bodies: the same bits as the Python's. */
import { describe, expect, test } from "vitest";

import { ActivationStore, inMemory } from "../src/edge_runtime/activations.ts";
import { augment } from "../src/edge_runtime/data/augment.ts";
import { numbers, type DType } from "../src/edge_runtime/data/arrays.ts";
import { convert, fitInputs } from "../src/edge_runtime/data/input_adapter.ts";
import { below, sampleBits, shuffled } from "../src/edge_runtime/data/prng.ts";
import { holdOut } from "../src/edge_runtime/data/samples.ts";
import { resize } from "../src/edge_runtime/data/resample.ts";
import { checkForwardGraph, checkTrainingGraph } from "../src/edge_runtime/graph_check.ts";
import { moveExternalData } from "../src/edge_runtime/graph_file.ts";
import { readGraph } from "../src/edge_runtime/onnx_file.ts";
import { UnsafeGraph } from "../src/edge_runtime/protobuf.ts";
import { begin, finish, type Begun } from "../src/edge_runtime/participant.ts";
import { batches, stepSeed } from "../src/edge_runtime/trainer.ts";
import { coverage, Coverage } from "../src/federation/coverage.ts";
import { Field } from "../src/federation/decode.ts";
import type { Kept, Part, ServerValues } from "../src/federation/device_task.ts";
import { trainedRegion } from "../src/federation/exchange.ts";
import { loads, type Manifest } from "../src/federation/manifest.ts";
import { decodeTask, type Report, type Task } from "../src/federation/messages.ts";
import { ofLayers, type Region } from "../src/federation/region.ts";
import { clip } from "../src/federation/rules/clipping.ts";
import { LocalStep, runs } from "../src/federation/rules/chain.ts";
import { rulesOf } from "../src/federation/rules/index.ts";
import { score } from "../src/federation/metrics.ts";
import { product, type Vector } from "../src/federation/space.ts";
import { syncOf } from "../src/federation/sync.ts";
import { decodeFirst, encode, MODEL, weightsHeader } from "../src/federation/wire.ts";
import { Bundle, bytes, floats, golden, pattern, sha256 } from "./values.ts";

const known = golden("pure.json");
const manifest: Manifest = loads(known.bodies.manifest);

describe("chance", () => {
  test("orders of samples", () => {
    for (const { n, seed, epoch, order } of known.chance.orders) expect([...shuffled(n, seed, epoch)]).toEqual(order);
  });

  test("bits of samples", () => {
    for (const { seed, epoch, index, draw, bits, below: small } of known.chance.bits) {
      expect(String(sampleBits(seed, epoch, index, draw))).toBe(bits);
      expect(below(BigInt(bits), 9)).toBe(small);
    }
  });

  test("seeds and batches of steps", () => {
    for (const { seed, round, seeds, batches: expected } of known.chance.steps) {
      const task = { seed, round } as Task;
      expect(seeds.map((_: unknown, number: number) => stepSeed(task, number))).toEqual(seeds);
      const found = [...batches(11, 4, task, 7)].map(({ epoch, indices }) => [epoch, [...indices]]);
      expect(found).toEqual(expected);
    }
  });

  test("widths of ordered dropout", () => {
    const found = known.chance.widths.map((_: unknown, seed: number) => below(sampleBits(seed, 0, 0, 2 ** 33), 3));
    expect(found).toEqual(known.chance.widths);
  });
});

describe("pictures", () => {
  test("crop and flip", () => {
    const { batch, shape, numbers: indices, augmented } = known.pictures;
    for (const { crop, flip, seed, epoch, sha256: expected } of augmented) {
      const found = augment({ crop, flip }, floats(batch), shape.slice(1), Int32Array.from(indices), seed, epoch);
      expect(sha256(found)).toBe(expected);
    }
  });

  test("activations as float16", async () => {
    const values = floats(known.pictures.halves.values);
    const store = await ActivationStore.make(1, { dtype: "float32", shape: [values.length] }, "float16", inMemory);
    store.write(0, values);
    expect([...(store.read([0]) as Vector)]).toEqual([...floats(known.pictures.halves.stored)]);
  });

  test("stored inputs as the model takes them", () => {
    for (const { dtype, shape, stored, takes, preprocessing, sha256: expected } of known.pictures.inputs) {
      const data = { dtype, shape, data: numbers(dtype as DType, bytes(stored).buffer) };
      const how = { ...preprocessing, scale: preprocessing.scale ?? undefined };
      const model = { name: "x", input: takes, preprocessing: how } as Manifest;
      expect(sha256(convert(fitInputs("data", data, model), data))).toBe(expected);
    }
  });

  test("resized as Pillow does", () => {
    for (const { from, to, pixels, resized } of known.pictures.resized) {
      expect([...resize(bytes(pixels), from[0], from[1], to[0], to[1])]).toEqual([...bytes(resized)]);
    }
  });
});

describe("scores", () => {
  test("held-out samples", () => {
    for (const { labels, classes, fraction, seed, held } of known.scores.held) {
      const found = holdOut(Float32Array.from(labels), labels.length, classes, fraction, seed);
      expect([...found].sort((a, b) => a - b)).toEqual(held);
    }
  });

  test("scores of outputs", () => {
    for (const { loss, shape, positions, labels, score: expected } of known.scores.scores) {
      const about = {
        name: loss.name,
        labelSmoothing: loss.label_smoothing,
        ignoreIndex: loss.ignore_index ?? undefined,
        classesLast: loss.classes_last ?? false,
        nextToken: loss.next_token ?? false,
        delta: loss.delta ?? undefined,
        gamma: loss.gamma ?? undefined,
      };
      const classes = loss.classes_last ? shape.at(-1) : shape[1];
      const { loss: total, ...rest } = score(about, shape[0], classes, pattern(product(shape), 4, 6), labels, positions[0]);
      expect(total).toBeCloseTo(expected.loss, 10);
      expect(rest).toEqual({ correct: expected.correct, counted: expected.counted, classifies: expected.classifies });
    }
  });
});

describe("graphs", () => {
  const demo = new Bundle("digits");
  const boundary = demo.manifest.boundary("dense");

  test.each(Object.entries<string>(known.graphs))("%s is refused", (_, graph) => {
    expect(() => checkTrainingGraph(bytes(graph), demo.manifest, boundary)).toThrow(UnsafeGraph);
  });

  test.each(["digits", "cnn", "mlp", "text"])("those of %s are honest", (name) => {
    const { manifest: made, file } = new Bundle(name);
    const read = file.bind(new Bundle(name));
    for (const each of made.boundaries) checkTrainingGraph(read(each.train!.name), made, each);
    for (const layer of made.layers) checkForwardGraph(read(layer.forward.name), made, layer);
  });

  test("a layer reads its own weights only", () => {
    const { manifest: made } = demo;
    const graph = demo.file(made.layers[1]!.forward.name);
    expect(() => checkForwardGraph(graph, made, made.layers[2]!)).toThrow(UnsafeGraph);
    expect(() => checkForwardGraph(moveExternalData(graph, [{ start: 4, stop: 1e9 }]), made, made.layers[1]!)).toThrow("another place");
  });

  test("a borrowed weight is allowed, and found behind the layer's own", () => {
    const { manifest: made } = demo;
    const last = made.layers.at(-1)!;
    const borrower = { ...last, parameters: [last.parameters[1]!], borrowed: [last.parameters[0]!.name] };
    const graph = demo.file(last.forward.name);
    const parameters = [...borrower.parameters, last.parameters[0]!];
    const start = weightsHeader(made.space).length;
    const parts = parameters.map(({ name }) => made.space.sliceOf(name)).map(({ start: from, stop }) => ({ start: start + 4 * from, stop: start + 4 * stop }));
    checkForwardGraph(graph, { ...made, space: made.space, parametersOf: () => parameters } as unknown as Manifest, borrower);
    const moved = new Map(readGraph(moveExternalData(graph, parts)).tensors.map(({ name, external }) => [name, external?.get("offset")]));
    expect(moved.get(parameters[0]!.name)).toBe("0");
    expect(moved.get(parameters[1]!.name)).toBe(String(4 * product(parameters[0]!.shape)));
    expect(() => moveExternalData(graph, parts.slice(1))).toThrow("data that it does not use");
  });

  test("any bytes are read or refused", () => {
    const whole = demo.file(boundary.train!.name);
    for (let at = 0; at < whole.length; at += 7) {
      const damaged = whole.slice();
      damaged[at] = damaged[at]! ^ (1 << (at % 8));
      for (const graph of [damaged, whole.slice(0, at)]) {
        try {
          readGraph(graph);
        } catch (error) {
          expect(error).toBeInstanceOf(UnsafeGraph);
        }
      }
    }
  });
});

describe("local rules", () => {
  test.each(Object.entries<any>(known.rules))("%s", (_, { rules, brought, x, update, state }) => {
    const size = 41;
    const start = pattern(size, 5);
    const given = Object.fromEntries(brought.map((name: string, salt: number) => [name, pattern(size, 6 + salt).map(Math.abs)]));
    const chain = rulesOf(new Field(rules, "rules"));
    const begun = { x: start, steps: 5, rate: 0.05, origin: start.slice(), brought: given, stepsBefore: 7 };
    const weights = [{ start: 2, stop: 19 }, { start: 23, stop: 41 }];
    const step = new LocalStep(chain, begun, weights, [{ start: 19, stop: 23 }]);
    for (let number = 0; number < 5; number++) step.step(pattern(size, 20 + number), 0.05);
    expect([...step.x]).toEqual([...floats(x)]);
    expect([...step.update()]).toEqual([...floats(update)]);
    const found = Object.fromEntries(Object.entries(step.state()).map(([name, vector]) => [name, [...vector]]));
    expect(found).toEqual(Object.fromEntries(Object.entries<string>(state).map(([name, text]) => [name, [...floats(text)]])));
  });
});

test.each(Object.entries<string>(known.clipped))("a gradient is shortened to %s", (most, expected) => {
  const gradients = pattern(41, 8);
  clip(gradients, [{ start: 2, stop: 19 }, { start: 23, stop: 41 }], Number(most));
  expect([...gradients]).toEqual([...floats(expected)]);
});

describe("bodies", () => {
  test("headers", () => {
    expect(sha256(weightsHeader(manifest.space))).toBe(known.bodies.weights_header);
    const rest = ofLayers(manifest.space, (layer) => layer >= 2);
    expect(sha256(weightsHeader(rest.space))).toBe(known.bodies.layers_header);
  });

  test("every unit of every plan", () => {
    for (const { sync, boundary, unit, size, sha256: expected } of known.bodies.units) {
      const region = syncOf(new Field(sync, "sync")).units(manifest.space)[unit]!;
      const sent = region.and(trainedRegion(manifest, coverage(manifest, boundary)));
      expect(sent.size).toBe(size);
      const body = encode(new Map([[MODEL, [sent, pattern(size, unit)]], ["control", [sent, pattern(size, 9)]]]));
      expect(sha256(body)).toBe(expected);
      const read = decodeFirst(new Map([[MODEL, sent], ["control", sent]]), body);
      expect([...read]).toEqual([...pattern(size, unit)]);
    }
  });
});

class PatternServer implements ServerValues {
  constructor(private readonly version: number) {}

  async model(part: Part): Promise<Vector> {
    return part.region.gather(pattern(manifest.space.size, 100 + this.version)).slice();
  }

  async before(part: Part): Promise<Vector> {
    return part.region.gather(pattern(manifest.space.size, 99 + this.version)).slice();
  }

  async state(name: string, part: Part): Promise<Vector> {
    return part.region.gather(pattern(manifest.space.size, 300 + name.length + this.version)).slice();
  }

  async inherited(): Promise<readonly [Region, Vector]> {
    const region = trainedRegion(manifest, coverage(manifest, "body"));
    return [region, pattern(region.size, 500 + this.version, 0.1)];
  }
}

function trainOnPatterns({ task, device, received }: Begun): LocalStep {
  const covered: Coverage = device.covered;
  const x = received.parameters.slice();
  const start = { x, steps: task.steps, rate: task.rate, origin: received.reference, brought: received.brought, stepsBefore: received.stepsBefore };
  const { weights, statistics } = runs(manifest.spaceOf(covered.boundary), covered.boundary.layer, covered);
  const local = new LocalStep(task.rules, start, weights, statistics);
  for (let number = 0; number < task.steps; number++) local.step(pattern(x.length, 1000 + 10 * task.round + number), task.rate);
  return local;
}

const hashes = (vectors: Readonly<Record<string, Vector>>): Record<string, string> =>
  Object.fromEntries(Object.entries(vectors).map(([name, vector]) => [name, sha256(vector)]));

describe("a device's part in rounds", () => {
  test.each(Object.entries<any>(known.participants))("%s", async (_, rounds) => {
    const memory = new Map<string, Kept>();
    for (const expected of rounds) {
      const task = decodeTask(expected.task);
      if (expected.loses) memory.clear();
      const begun = await begin(task, manifest, new PatternServer(task.round), async (last) => memory.get(last));
      const local = trainOnPatterns(begun);
      const contribution = finish(begun, { local, report: {} as Report });
      expect(begun.device.lost).toBe(expected.lost);
      expect(sha256(begun.received.parameters)).toBe(expected.parameters);
      expect(sha256(begun.received.reference)).toBe(expected.reference);
      expect(hashes(begun.received.brought)).toEqual(expected.brought);
      expect(sha256(encode(contribution.tracks))).toBe(expected.body);
      expect(hashes(contribution.kept)).toEqual(expected.kept);
      expect(contribution.walked).toEqual(expected.walked);
      expect(contribution.steps).toBe(expected.steps);
      const id = `task-${task.round}`;
      const vectors = Object.fromEntries(Object.entries(contribution.kept).map(([name, vector]) => [name, vector.slice()]));
      memory.set(id, { task: id, boundary: task.boundary, vectors, walked: contribution.walked, steps: contribution.steps });
    }
  });
});
