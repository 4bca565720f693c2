/** Measure this device: a fresh worker, and so a fresh runtime, for each tier, the weakest first. */
import type { OpenJob } from "../edge_runtime/client.ts";
import type { DeviceRecord } from "../edge_runtime/storage.ts";
import { shortText, tierBoundaries, tiersOf, type Benchmark, type BoundaryCost } from "../federation/benchmark.ts";
import { predictedPeak } from "../federation/capacity.ts";
import { EmbraceError } from "../federation/errors.ts";
import { loads } from "../federation/manifest.ts";
import { BENCH_WORKER, type Measure, type Measured } from "./protocol.ts";

const ITERATIONS = 10;

/**
 * Measure what a job trains; a tier that does not fit the memory becomes a line with the reason. `newest` tells how far
 * the job is: others train meanwhile, and older versions go.
 */
export async function measureDevice({ memory }: DeviceRecord, newest: () => Promise<OpenJob>, progress: (done: number, total: number) => void): Promise<Benchmark> {
  const job = await newest();
  const manifest = loads(JSON.stringify(job.manifest));
  const chosen = tierBoundaries(manifest);
  const costs: BoundaryCost[] = [];
  let known: (Measured & { kind: "measured" }) | undefined;
  for (const boundary of chosen.toReversed()) {
    progress(costs.length, chosen.length);
    const lacking = (problem: string): BoundaryCost => ({
      boundary: boundary.name, tiers: tiersOf(manifest, boundary.name), seconds: null, memory: null, problem: shortText(problem),
    });
    const need = predictedPeak(manifest, boundary, job.batch);
    if (need > memory) {
      costs.push(lacking(`needs ${megabytes(need)} by prediction, ${megabytes(memory)} are allowed`));
      continue;
    }
    const what = { boundary: boundary.name, batch: job.batch, iterations: ITERATIONS };
    const ask = async (): Promise<Measure> => ({ kind: "measure", job: job.id, bundle: job.bundle, version: (await newest()).round, ...what });
    let found = await inFreshWorker(await ask());
    if (found.kind === "unmeasured" && found.gone) found = await inFreshWorker(await ask());
    if (found.kind === "unmeasured" && !found.outOfMemory) throw new EmbraceError(found.why);
    if (found.kind === "measured") known ??= found;
    costs.push(found.kind === "measured" ? found.cost : lacking(found.why));
  }
  progress(chosen.length, chosen.length);
  if (known === undefined) throw new EmbraceError(costs[0]!.problem);
  return {
    bundle: job.bundle,
    model: manifest.name,
    batch: job.batch,
    iterations: ITERATIONS,
    runtime: known.runtime,
    threads: known.threads,
    costs: costs.toReversed(),
    processor: "",
    system: shortText(navigator.userAgent),
    cores: navigator.hardwareConcurrency || 1,
    idle: known.idle,
  };
}

function inFreshWorker(asked: Measure): Promise<Measured> {
  const worker = new Worker(new URL("./worker.ts", import.meta.url), { type: "module", name: BENCH_WORKER });
  const answer = new Promise<Measured>((resolve) => {
    worker.onmessage = ({ data }: MessageEvent<Measured>) => resolve(data);
    worker.onerror = (event) => resolve({ kind: "unmeasured", why: event.message || "the worker could not start", outOfMemory: false, gone: false });
  });
  worker.postMessage(asked);
  return answer.finally(() => worker.terminate());
}

function megabytes(bytes: number): string {
  return `${(bytes / 1e6).toFixed(1)} MB`;
}
