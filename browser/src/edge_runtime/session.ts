/** Sessions of onnxruntime-web: what is the same for every graph that a device runs. */
import * as ort from "onnxruntime-web/wasm";

import { BundleError, messageOf, OutOfMemory } from "../federation/errors.ts";
import type { Bytes } from "../federation/space.ts";
import type { DType, Numbers } from "./data/arrays.ts";
import { WEIGHTS_FILE } from "./graph_file.ts";

export const RUNTIME = `onnxruntime-web ${ort.env.versions.web ?? ""} wasm`;
export type Session = ort.InferenceSession;

/** Decide how many threads the runtime has, once and before the first session; returns how many it has. */
export function setThreads(wanted: number): number {
  const most = globalThis.crossOriginIsolated ? wanted : 1; // threads share memory, which only isolated pages may
  ort.env.wasm.numThreads = most;
  return most;
}

/** Tell where the runtime's own files are. */
export function setRuntimeFiles(mjs: string, wasm: string): void {
  ort.env.wasm.wasmPaths = { mjs, wasm };
}

/** Load the runtime, so that its idle size is known: the smallest graph there is, y = x. */
export async function warmUp(): Promise<void> {
  const identity = "CAoSADo3ChAKAXgSAXkiCElkZW50aXR5EgFnWg8KAXgSCgoICAESBAoCCAFiDwoBeRIKCggIARIECgIIAUIECgAQEg==";
  await (await open(Uint8Array.from(atob(identity), (letter) => letter.charCodeAt(0)), {})).release();
}

/** Open a frozen layer with its weights. */
export function inferenceSession(graph: Bytes, weights: Bytes): Promise<Session> {
  return open(graph, { externalData: [{ path: WEIGHTS_FILE, data: weights }] });
}

/** Open a training graph, to be run exactly as it was written: its order decides how much is alive at once. */
export function trainingSession(graph: Bytes): Promise<Session> {
  return open(graph, { graphOptimizationLevel: "disabled" });
}

/** Make a tensor of numbers that are there. */
export function tensor(dtype: DType, data: Numbers, shape: readonly number[]): ort.Tensor {
  return new ort.Tensor(dtype as "float32", data as Float32Array, shape);
}

/** Recognise it by the words of the message: onnxruntime has no type for it. */
export function isOutOfMemory(error: unknown): boolean {
  return error instanceof RangeError || /bad_?alloc|allocat|out of memory|memory access out of bounds|Aborted|OOM/i.test(messageOf(error));
}

async function open(graph: Bytes, options: ort.InferenceSession.SessionOptions): Promise<Session> {
  try {
    return await ort.InferenceSession.create(graph, {
      executionProviders: ["wasm"],
      enableMemPattern: false, // one block planned ahead for all values, on top of the first run's own
      logSeverityLevel: 4, // errors come as exceptions
      ...options,
    });
  } catch (error) {
    if (isOutOfMemory(error)) throw new OutOfMemory("not enough memory to load a graph");
    throw new BundleError(`${RUNTIME} cannot load a graph: ${messageOf(error)}`);
  }
}
