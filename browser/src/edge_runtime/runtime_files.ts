/** The files of the runtime as Vite serves them; of the two that there are a page loads one. */
import gpuModule from "onnxruntime-web/ort-wasm-simd-threaded.jspi.mjs?url&no-inline";
import gpuWasm from "onnxruntime-web/ort-wasm-simd-threaded.jspi.wasm?url&no-inline";
import module from "onnxruntime-web/ort-wasm-simd-threaded.mjs?url&no-inline";
import wasm from "onnxruntime-web/ort-wasm-simd-threaded.wasm?url&no-inline";

import hold from "./runtime_module.mjs?url&no-inline";
import { loadRuntime, type Runtime } from "./runtime.ts";

/** Load the runtime in a page's worker. */
export async function loadForPage(threads: number, withGpu = false): Promise<Runtime> {
  if (!withGpu) return loadRuntime(await import("onnxruntime-web/wasm"), { hold, module, wasm }, threads);
  return loadRuntime(await import("onnxruntime-web/jspi"), { hold, module: gpuModule, wasm: gpuWasm }, threads, true);
}
