/**
 * Measure what training from a boundary costs here, as edge_runtime/measure.py does: the frozen layers, the stored
 * activations, the step, the local rule. Random inputs serve: neither memory nor time depends on the values.
 */
import { quantile, tiersOf, type BoundaryCost } from "../federation/benchmark.ts";
import { coverage } from "../federation/coverage.ts";
import type { Boundary, Layer, Manifest, TensorSpec } from "../federation/manifest.ts";
import type { TaskOffer } from "../federation/messages.ts";
import { LocalStep, runs } from "../federation/rules/chain.ts";
import { Momentum } from "../federation/rules/momentum.ts";
import { WeightDecay } from "../federation/rules/weight_decay.ts";
import { product, type Vector } from "../federation/space.ts";
import { ActivationStore, inMemory } from "./activations.ts";
import { numbers, type DType, type Numbers } from "./data/arrays.ts";
import { shuffled } from "./data/prng.ts";
import type { Labels } from "./data/targets.ts";
import { openStep } from "./gpu_step.ts";
import { RemoteSource, type RemoteBundle } from "./remote.ts";
import { inferenceSession, tensor } from "./session.ts";

const WARM_UP = 2; // iterations that do not count
const RATE = 1e-3;

export interface BenchCase {
  readonly boundary: string;
  readonly batch: number;
  readonly iterations: number;
}

/** Measure one boundary in a runtime that has done nothing else; `heapBytes` is its size beyond the idle one. */
export async function benchBoundary(bundle: RemoteBundle, offer: TaskOffer, { boundary: name, batch, iterations }: BenchCase, heapBytes: () => number): Promise<BoundaryCost> {
  const { manifest } = bundle;
  const boundary = manifest.boundary(name);
  const entry = manifest.entry(boundary);
  const count = WARM_UP + iterations;
  const frozen = await runFrozen(new RemoteSource(bundle, offer), manifest.frozen(boundary), batch, count);
  const store = manifest.frozen(boundary).length > 0 ? await ActivationStore.make(count * batch, entry, "float32", inMemory) : undefined;
  const order = shuffled(count * batch, 0, 0);
  const graph = await bundle.trainingGraph(boundary);
  const [step, opening] = await timed(() => openStep(graph, manifest.spaceOf(boundary), boundary.layer, entry, manifest.labels, () => {}));
  const vector = 4 * step.parameters.length; // bytes
  const [io, training, optimiser]: [number[], number[], number[]] = [[], [], []];
  try {
    for (let number = 0; number < count; number++) io.push((await timed(() => store?.write(number * batch, frozen.output)))[1]);
    step.parameters.set(await weightsOf(bundle, offer, boundary));
    const local = localStep(manifest, boundary, step.parameters, count);
    const labels = randomLabels(manifest, batch);
    for (let number = 0; number < count; number++) {
      const [inputs, reading] = await timed(() => store?.read(order.subarray(number * batch, (number + 1) * batch)) ?? frozen.output);
      io[number] = store === undefined ? 0 : io[number]! + reading;
      training.push((await timed(() => step.run({ size: batch, inputs, labels }, number)))[1]);
      optimiser.push((await timed(() => local.step(step.gradients, RATE)))[1]);
    }
  } finally {
    await step.release();
    store?.close();
  }
  const counted = (values: readonly number[]): number[] => values.slice(WARM_UP);
  const median = (values: readonly number[]): number => quantile(counted(values), 0.5);
  const whole = counted(training.map((seconds, at) => frozen.seconds[at]! + io[at]! + seconds + optimiser[at]!));
  const seconds = {
    load: frozen.load + opening,
    frozen_forward: median(frozen.seconds),
    activation_io: median(io),
    training: median(training),
    optimiser: median(optimiser),
    batch: quantile(whole, 0.5),
    low: quantile(whole, 0.25),
    high: quantile(whole, 0.75),
    backward: null,
  };
  // The heap has the graph, its values, parameters and gradients; beside it are momentum, received weights, activations.
  const memory = heapBytes() + 2 * vector + (store?.bytes ?? 0);
  return { boundary: boundary.name, tiers: tiersOf(manifest, boundary.name), seconds, memory, problem: "" };
}

interface FrozenRun {
  readonly output: Numbers; // what the trained part gets
  readonly load: number;
  readonly seconds: readonly number[]; // of every iteration
}

/** Run a batch through the layers in front of a boundary, one after the other, each so many times. */
async function runFrozen(source: RemoteSource, layers: readonly Layer[], batch: number, count: number): Promise<FrozenRun> {
  const { manifest } = source;
  const seconds = new Array<number>(count).fill(0);
  let load = 0;
  let value = randomInputs(manifest.input, batch, manifest.vocabulary);
  for (const layer of layers) {
    const { graph, weights } = await source.fetch(layer);
    const { dtype, shape } = layer.input;
    const [session, opening] = await timed(() => inferenceSession(graph, weights));
    load += opening;
    try {
      let output = value;
      for (let number = 0; number < count; number++) {
        const [found, took] = await timed(() => session.run({ input: tensor(dtype as DType, value, [batch, ...shape]) }, ["output"]));
        output = found.output!.data as Numbers;
        seconds[number]! += took;
      }
      value = output;
    } finally {
      await session.release(); // before the next one is loaded
    }
  }
  return { output: value, load, seconds };
}

async function timed<T>(work: () => T | Promise<T>): Promise<[T, number]> {
  const began = performance.now();
  const found = await work();
  return [found, (performance.now() - began) / 1000];
}

/** The weights that a device receives which trains from a boundary; a narrow one gets numbers of no meaning. */
async function weightsOf(bundle: RemoteBundle, offer: TaskOffer, boundary: Boundary): Promise<Vector> {
  const space = bundle.manifest.spaceOf(boundary);
  const where = space.suffix(boundary.layer);
  if (boundary.narrow === undefined) return new Float32Array((await bundle.weights(offer, where)).buffer);
  return Float32Array.from({ length: where.stop - where.start }, () => 0.1 * Math.random());
}

function localStep(manifest: Manifest, boundary: Boundary, x: Vector, steps: number): LocalStep {
  const { weights, statistics } = runs(manifest.spaceOf(boundary), boundary.layer, coverage(manifest, boundary.name));
  const start = { x, steps, rate: RATE, origin: x.slice(), brought: {}, stepsBefore: 0 };
  return new LocalStep([new WeightDecay(1e-4), new Momentum(0.9, false, "reset")], start, weights, statistics);
}

function randomInputs({ dtype, shape }: TensorSpec, count: number, vocabulary: number | undefined): Numbers {
  return drawn(dtype as DType, count * product(shape), dtype.startsWith("float") ? undefined : (vocabulary ?? 2));
}

/** Labels that the model's loss accepts. */
function randomLabels({ labels, labelCount }: Manifest, count: number): Labels {
  return drawn(labels.dtype as DType, count * product(labels.shape), labelCount ?? 2) as Labels;
}

/** Draw integers below a number; without one, fractions. */
function drawn(dtype: DType, length: number, most?: number): Numbers {
  const found = numbers(dtype, length);
  for (let at = 0; at < length; at++) {
    const value = most === undefined ? Math.random() : Math.floor(Math.random() * most);
    found[at] = dtype.endsWith("int64") ? BigInt(value) : value;
  }
  return found;
}
