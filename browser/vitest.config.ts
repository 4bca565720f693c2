import { fileURLToPath } from "node:url";

import { defineConfig } from "vitest/config";

// onnxruntime-web for Node: the same wasm, loaded from the disk.
const runtime = fileURLToPath(new URL("node_modules/onnxruntime-web/dist/ort.node.min.mjs", import.meta.url));

export default defineConfig({
  resolve: { alias: { "onnxruntime-web/wasm": runtime } },
  test: { include: ["tests/*.test.ts"], testTimeout: 60_000 },
});
