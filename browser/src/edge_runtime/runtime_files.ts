/** The files of the runtime as Vite serves them; of the two that there are a page loads one. */
import gpuModule from "onnxruntime-web/ort-wasm-simd-threaded.jspi.mjs?url&no-inline";
import gpuWasm from "onnxruntime-web/ort-wasm-simd-threaded.jspi.wasm?url&no-inline";
import module from "onnxruntime-web/ort-wasm-simd-threaded.mjs?url&no-inline";
import wasm from "onnxruntime-web/ort-wasm-simd-threaded.wasm?url&no-inline";

import { messageOf } from "../federation/errors.ts";
import type { Note } from "./gpu_step.ts";
import { loadRuntime, type Runtime } from "./runtime.ts";
import hold from "./runtime_module.mjs?url&no-inline";

/** Load the runtime in a page's worker: the one with WebGPU if it is wanted and starts, else the other. */
export async function loadForPage(threads: number, withGpu = false, note: Note = () => {}): Promise<Runtime> {
  if (withGpu) {
    try {
      return await loadRuntime(await import("onnxruntime-web/jspi"), { hold, module: gpuModule, wasm: gpuWasm }, threads, true);
    } catch (error) {
      note(`WebGPU's runtime does not start, so the other one does: ${messageOf(error)}`);
    }
  }
  return loadRuntime(await import("onnxruntime-web/wasm"), { hold, module, wasm }, threads);
}
