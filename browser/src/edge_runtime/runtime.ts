/** The runtime: onnxruntime-web, loaded once. With WebGPU it is another, larger file, loaded only where there is an adapter. */
import type * as Ort from "onnxruntime-web/wasm";

import { EmbraceError } from "../federation/errors.ts";

export type Provider = "wasm" | "webgpu";

/** Where the runtime's own files are. */
export interface RuntimeFiles {
  readonly hold: string; // runtime_module.mjs
  readonly module: string;
  readonly wasm: string;
}

/** The instance of WebAssembly as far as it is used here: wasm-types.ts of onnxruntime-web 1.30. */
export interface Instance {
  readonly HEAPU8: Uint8Array<ArrayBuffer>; // shared between threads, so a view of it stays good when it grows
  _malloc(bytes: number): number;
  _free(place: number): void;
  stackSave(): number;
  stackAlloc(bytes: number): number;
  stackRestore(stack: number): void;
  getValue(place: number, type: string): number;
  setValue(place: number, value: number, type: string): void;
  lengthBytesUTF8(text: string): number;
  stringToUTF8(text: string, place: number, most: number): void;
  UTF8ToString(place: number): string;
  _OrtCreateTensor(dtype: number, place: number, bytes: number, shape: number, dimensions: number, location: number): number;
  _OrtReleaseTensor(tensor: number): number;
  _OrtRun(session: number, inputNames: number, inputs: number, inputCount: number, outputNames: number, outputCount: number, outputs: number, options: number): number | Promise<number>;
  _OrtGetLastError(code: number, message: number): number;
}

export interface Runtime {
  readonly ort: typeof Ort;
  readonly instance: Instance;
  readonly name: string;
  readonly threads: number;
  readonly hasGpu: boolean;
}

let loaded: Runtime | undefined;

/** The runtime that was loaded. */
export function runtime(): Runtime {
  if (loaded === undefined) throw new EmbraceError("the runtime is not loaded yet");
  return loaded;
}

/** Load it, with as many threads as are wanted and allowed: threads share memory, which only isolated pages may. */
export async function loadRuntime(ort: typeof Ort, files: RuntimeFiles, wanted: number, hasGpu = false): Promise<Runtime> {
  ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? wanted : 1;
  ort.env.wasm.wasmPaths = { mjs: `${files.hold}?of=${encodeURIComponent(files.module)}`, wasm: files.wasm };
  // The smallest graph there is, y = x: afterwards the runtime's idle size is known.
  const identity = "CAoSADo3ChAKAXgSAXkiCElkZW50aXR5EgFnWg8KAXgSCgoICAESBAoCCAFiDwoBeRIKCggIARIECgIIAUIECgAQEg==";
  const session = await ort.InferenceSession.create(Uint8Array.from(atob(identity), (letter) => letter.charCodeAt(0)), { executionProviders: ["wasm"] });
  await session.release();
  const instance = (globalThis as unknown as Record<symbol, Instance>)[Symbol.for("embrace runtime")]!;
  const name = `onnxruntime-web ${ort.env.versions.web ?? ""} ${hasGpu ? "webgpu" : "wasm"}`;
  return (loaded = { ort, instance, name, threads: ort.env.wasm.numThreads, hasGpu }); // it may have lowered the number
}
