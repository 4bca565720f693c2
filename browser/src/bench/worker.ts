/** One column of `embrace bench browser`: a runtime, and the training step of a boundary. */
import { heapBytes, watchHeap } from "../edge_runtime/heap.ts";
import { loadForPage } from "../edge_runtime/runtime_files.ts";
import type { Provider } from "../edge_runtime/runtime.ts";
import { TrainingStep, type Batch } from "../edge_runtime/step.ts";
import { coverage } from "../federation/coverage.ts";
import { messageOf } from "../federation/errors.ts";
import { loads } from "../federation/manifest.ts";
import { LocalStep, runs } from "../federation/rules/chain.ts";
import { Momentum } from "../federation/rules/momentum.ts";
import { WeightDecay } from "../federation/rules/weight_decay.ts";
import type { Bytes } from "../federation/space.ts";
import type { Answer, Load, Open, Step, WorkerOrder } from "./orders.ts";

declare const self: DedicatedWorkerGlobalScope;

watchHeap();
let provider: Provider = "wasm";
let opened: { step: TrainingStep; local: LocalStep; batch: Batch } | undefined;

self.onmessage = async ({ data }: MessageEvent<WorkerOrder>) => {
  let answer: Answer;
  try {
    answer = await (data.do === "load" ? load(data) : data.do === "open" ? open(data) : run(data));
  } catch (error) {
    answer = { error: messageOf(error) };
  }
  self.postMessage({ ...answer, heap: heapBytes(), bytes: transferred() });
};

async function load(order: Load): Promise<Answer> {
  provider = order.provider;
  const began = performance.now();
  const { name, threads } = await loadForPage(order.threads, provider === "webgpu");
  return { runtime: name, threads, milliseconds: performance.now() - began };
}

async function open(order: Open): Promise<Answer> {
  const began = performance.now();
  const manifest = loads(new TextDecoder().decode(await read(`${order.bundle}/manifest.json`)));
  const covered = coverage(manifest, order.boundary);
  const { boundary } = covered;
  const [space, entry, labels] = [manifest.spaceOf(boundary), manifest.entry(boundary), manifest.labels];
  const graph = await read(`${order.bundle}/${boundary.train!.name}`);
  const step = await TrainingStep.open(graph, space, boundary.layer, entry, labels, { provider });
  step.parameters.set(new Float32Array((await read(`${order.bundle}/bench/${boundary.name}/parameters`)).buffer));
  const numbers = async (what: string, dtype: string): Promise<Batch["inputs"] & Batch["labels"]> => {
    const { buffer } = await read(`${order.bundle}/bench/${boundary.name}/${what}`);
    return (dtype === "int64" ? new BigInt64Array(buffer) : new Float32Array(buffer)) as Batch["inputs"] & Batch["labels"];
  };
  const batch = { size: order.batch, inputs: await numbers("inputs", entry.dtype), labels: await numbers("labels", labels.dtype) };
  const start = { x: step.parameters, steps: 1, rate: 1, origin: step.parameters.slice(), brought: {}, stepsBefore: 0 };
  const found = runs(space, boundary.layer, covered);
  opened = { step, local: new LocalStep([new WeightDecay(1e-4), new Momentum(0.9, false, "reset")], start, found.weights, found.statistics), batch };
  return { milliseconds: performance.now() - began };
}

async function run(order: Step): Promise<Answer> {
  const { step, local, batch } = opened!;
  const [losses, steps, rules]: [number[], number[], number[]] = [[], [], []];
  for (let number = 0; number < order.count; number++) {
    const began = performance.now();
    losses.push(await step.run(batch, 1));
    const ran = performance.now();
    local.step(step.gradients, order.rate);
    steps.push(ran - began);
    rules.push(performance.now() - ran);
  }
  return { loss: losses[0], steps, rules };
}

async function read(path: string): Promise<Bytes> {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return new Uint8Array(await answer.arrayBuffer());
}

/** Bytes that came over the network for this column; a device has its data already. */
function transferred(): number {
  const entries = (performance.getEntriesByType("resource") as PerformanceResourceTiming[]).filter(({ name }) => !/\/(inputs|labels)$/.test(name));
  return entries.reduce((sum, { transferSize }) => sum + transferSize, 0);
}
