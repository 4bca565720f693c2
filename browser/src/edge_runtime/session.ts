/** Sessions of onnxruntime-web: what is the same for every graph that a device runs. */
import type * as Ort from "onnxruntime-web/wasm";

import { BundleError, messageOf, OutOfMemory } from "../federation/errors.ts";
import type { Bytes } from "../federation/space.ts";
import type { DType, Numbers } from "./data/arrays.ts";
import { forGpu } from "./gpu_graph.ts";
import { WEIGHTS_FILE } from "./graph_file.ts";
import { runtime, type Provider } from "./runtime.ts";

export type Session = Ort.InferenceSession;

/** Open a frozen layer with its weights. */
export function inferenceSession(graph: Bytes, weights: Bytes): Promise<Session> {
  return open(graph, { externalData: [{ path: WEIGHTS_FILE, data: weights }] });
}

/** Open a training graph, to be run exactly as it was written: its order decides how much is alive at once. */
export function trainingSession(graph: Bytes, provider: Provider = "wasm"): Promise<Session> {
  return open(provider === "webgpu" ? forGpu(graph) : graph, { graphOptimizationLevel: "disabled", executionProviders: [provider] });
}

/** Make a tensor of numbers that are there. */
export function tensor(dtype: DType, data: Numbers, shape: readonly number[]): Ort.Tensor {
  return new (runtime().ort.Tensor)(dtype as "float32", data as Float32Array, shape);
}

/** Recognise it by the words of the message: onnxruntime has no type for it. */
export function isOutOfMemory(error: unknown): boolean {
  return error instanceof RangeError || /bad_?alloc|allocat|out of memory|memory access out of bounds|Aborted|OOM/i.test(messageOf(error));
}

async function open(graph: Bytes, options: Ort.InferenceSession.SessionOptions): Promise<Session> {
  try {
    return await runtime().ort.InferenceSession.create(graph, {
      executionProviders: ["wasm"],
      enableMemPattern: false, // one block planned ahead for all values, on top of the first run's own
      logSeverityLevel: 4, // errors come as exceptions
      ...options,
    });
  } catch (error) {
    if (isOutOfMemory(error)) throw new OutOfMemory("not enough memory to load a graph");
    throw new BundleError(`${runtime().name} cannot load a graph: ${messageOf(error)}`);
  }
}
