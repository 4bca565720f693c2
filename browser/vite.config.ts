import { readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

import { defaultClientConditions, defineConfig, type Plugin } from "vite";

const LARGE = 10_000; // bytes

/** Leave large files compressed only: the coordinator sends them as they are. */
function compressed(folder: string): Plugin {
  return {
    name: "compressed",
    closeBundle() {
      for (const name of readdirSync(folder)) {
        const path = join(folder, name);
        const content = readFileSync(path);
        if (content.length < LARGE) continue;
        writeFileSync(`${path}.gz`, gzipSync(content, { level: 9 }));
        rmSync(path);
      }
    },
  };
}

const here = (path: string): string => fileURLToPath(new URL(path, import.meta.url));

export default defineConfig({
  base: "/web/",
  plugins: [compressed(here("../coordinator/web/assets"))],
  // The runtime's files stay files of their own: its threads load the same module, and the browser compiles wasm while it comes.
  resolve: { conditions: ["onnxruntime-web-use-extern-wasm", ...defaultClientConditions] },
  build: {
    outDir: here("../coordinator/web"),
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // the Content-Security-Policy allows no data: addresses
    modulePreload: { polyfill: false },
    rolldownOptions: { input: { join: here("join.html"), bench: here("bench.html"), dashboard: here("index.html") } },
  },
  worker: { format: "es" },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
});
