/** Numbers that Python and TypeScript make alike (tests/golden/values.py), and the files that both suites read. */
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { loadRuntime, type Runtime } from "../src/edge_runtime/runtime.ts";
import { loads, type Manifest } from "../src/federation/manifest.ts";
import type { Bytes, Vector } from "../src/federation/space.ts";

export const GOLDEN = fileURLToPath(new URL("../../tests/golden/files/", import.meta.url));
const DIGITS = fileURLToPath(new URL("../../embrace/demo/digits/model/", import.meta.url));

export function pattern(size: number, salt: number, scale = 1): Vector {
  return Float32Array.from({ length: size }, (_, i) => (((i * 7919 + salt * 104729) % 2003) / 2003 - 0.5) * scale);
}

export function bytes(base64: string): Bytes {
  return new Uint8Array(Buffer.from(base64, "base64"));
}

export function floats(base64: string): Vector {
  return new Float32Array(bytes(base64).buffer);
}

export function sha256(array: ArrayBufferView): string {
  return createHash("sha256").update(new Uint8Array(array.buffer, array.byteOffset, array.byteLength)).digest("hex");
}

export function golden(name: string): any {
  return JSON.parse(readFileSync(GOLDEN + name, "utf8"));
}

/** Load the runtime from the disk: the same wasm as in a page. */
export async function loadForNode(): Promise<Runtime> {
  const file = (path: string): string => new URL(path, import.meta.url).href;
  const dist = (name: string): string => file(`../node_modules/onnxruntime-web/dist/${name}`);
  const module = "ort-wasm-simd-threaded";
  const files = { hold: file("../src/edge_runtime/runtime_module.mjs"), module: dist(`${module}.mjs`), wasm: dist(`${module}.wasm`) };
  return loadRuntime(await import("onnxruntime-web/wasm"), files, 1);
}

/** A bundle on disk. */
export class Bundle {
  readonly folder: string;
  readonly manifest: Manifest;

  constructor(name: string) {
    this.folder = name === "digits" ? DIGITS : `${GOLDEN}${name}/`;
    this.manifest = loads(readFileSync(`${this.folder}manifest.json`, "utf8"));
  }

  file(name: string): Bytes {
    return new Uint8Array(readFileSync(this.folder + name));
  }
}
