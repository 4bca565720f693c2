/**
 * The multi-step forward pass: load some frozen layers, run the local data through them, store what comes out, discard
 * them, go on with the next. While one group of layers computes, the next one is fetched.
 */
import { EmbraceError, messageOf, OutOfMemory } from "../federation/errors.ts";
import type { Layer, Manifest } from "../federation/manifest.ts";
import { product, type Bytes } from "../federation/space.ts";
import { ActivationStore, type MakeRoom } from "./activations.ts";
import type { DType, Numbers } from "./data/arrays.ts";
import { inferenceSession, isOutOfMemory, tensor, type Session } from "./session.ts";
import type { Stopwatch } from "./timing.ts";

/** A graph whose weights lie at the beginning of some bytes. */
export interface FetchedLayer {
  readonly graph: Bytes;
  readonly weights: Bytes;
}

/** Gives layers to run. */
export interface LayerSource {
  readonly manifest: Manifest;
  readonly lineage: string; // the training that the weights come from
  readonly version: string; // what was computed with one version is not valid for another
  fetch(layer: Layer): Promise<FetchedLayer>;
}

export interface ForwardPlan {
  readonly batch: number; // samples that go through a layer at once
  readonly memory: number; // bytes for the layers that are loaded at the same time
  readonly storedAs: "float32" | "float16";
  readonly makeRoom: MakeRoom;
}

export type Progress = (what: string, done: number, total: number) => Promise<void> | void;

/** Group consecutive layers that are loaded together: as many as the memory allows, at least one. */
export function groups(manifest: Manifest, layers: readonly Layer[], memory: number): Layer[][] {
  const found: Layer[][] = [];
  let used = 0;
  for (const layer of layers) {
    // As they came, and packed for the processor.
    const size = 2 * 4 * manifest.parametersOf(layer).reduce((sum, p) => sum + product(p.shape), 0);
    if (found.length > 0 && used + size <= memory) {
      found.at(-1)!.push(layer);
      used += size;
    } else {
      found.push([layer]);
      used = size;
    }
  }
  return found;
}

/** Run `count` samples through frozen layers and store what the last one gives. */
export async function storeActivations(
  source: LayerSource,
  layers: readonly Layer[],
  inputs: (indices: Int32Array) => Numbers,
  count: number,
  plan: ForwardPlan,
  watch: Stopwatch,
  progress: Progress,
): Promise<ActivationStore> {
  const parts = groups(source.manifest, layers, plan.memory);
  let store: ActivationStore | undefined;
  let fetching = fetchAll(source, parts[0]!, watch);
  for (const [place, part] of parts.entries()) {
    const { fetched } = await watch.part("download", async () => {
      const waiting = watch.now();
      const found = await fetching;
      watch.hiddenDownload += Math.max(0, found.seconds - (watch.now() - waiting));
      return found;
    });
    const following = parts[place + 1];
    if (following !== undefined) {
      fetching = fetchAll(source, following, watch);
      fetching.catch(() => {}); // heard when it is waited for
    }
    const next = await ActivationStore.make(count, part.at(-1)!.output, plan.storedAs, plan.makeRoom);
    const sessions: Session[] = [];
    try {
      for (const layer of fetched) {
        sessions.push(await watch.part("load", () => inferenceSession(layer.graph, layer.weights)));
      }
      for (let start = 0; start < count; start += plan.batch) {
        const indices = Int32Array.from({ length: Math.min(plan.batch, count - start) }, (_, i) => start + i);
        await progress("forward", layers.indexOf(part[0]!) * count + part.length * (start + indices.length), layers.length * count);
        let value = await watch.part("activation_io", () => (store ? store.read(indices) : inputs(indices)));
        for (const [at, session] of sessions.entries()) {
          value = await runLayer(session, part[at]!, value, indices.length, watch);
        }
        await watch.part("activation_io", () => next.write(start, value));
      }
    } catch (error) {
      next.close();
      throw error;
    } finally {
      for (const session of sessions) await session.release(); // before the next group is loaded
      store?.close();
    }
    store = next;
  }
  return store!;
}

async function runLayer(session: Session, layer: Layer, value: Numbers, count: number, watch: Stopwatch): Promise<Numbers> {
  return watch.part(`forward/${layer.name}`, async () => {
    try {
      const feed = tensor(layer.input.dtype as DType, value, [count, ...layer.input.shape]);
      const found = await session.run({ input: feed }, ["output"]);
      return found.output!.data as Numbers;
    } catch (error) {
      if (isOutOfMemory(error)) throw new OutOfMemory(`not enough memory to run layer '${layer.name}' on ${count} samples`);
      throw new EmbraceError(`layer '${layer.name}' failed: ${messageOf(error)}`);
    }
  });
}

async function fetchAll(source: LayerSource, part: readonly Layer[], watch: Stopwatch): Promise<{ fetched: FetchedLayer[]; seconds: number }> {
  const began = watch.now();
  const fetched: FetchedLayer[] = [];
  for (const layer of part) fetched.push(await source.fetch(layer));
  return { fetched, seconds: watch.now() - began };
}
