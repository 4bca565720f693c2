/** How well a version does on data: the multi-step forward pass through all layers, and the model's own loss. */
import { add, NOTHING, score, type Score } from "../federation/metrics.ts";
import type { Samples } from "./data/samples.ts";
import { storeActivations, type ForwardPlan, type LayerSource, type Progress } from "./forward.ts";
import { Stopwatch } from "./timing.ts";

const ROWS = 1024; // predictions that are scored at a time

/** Score a version as it was received: all of its layers, a few at a time, within the memory of the plan. */
export async function scoreReceived(
  source: LayerSource,
  samples: Samples,
  plan: Omit<ForwardPlan, "storedAs">,
  watch: Stopwatch,
  progress: Progress,
): Promise<Score> {
  const { manifest } = source;
  return watch.part("evaluation", async () => {
    const own = new Stopwatch(watch.now); // its parts are part of evaluation
    const inputs = (indices: Int32Array) => samples.inputs(indices);
    const told: Progress = (_, done, total) => progress("evaluate", done, total);
    const outputs = await storeActivations(source, manifest.layers, inputs, samples.length, { ...plan, storedAs: "float32" }, own, told);
    try {
      let total = NOTHING;
      for (let start = 0; start < samples.length; start += ROWS) {
        const indices = Int32Array.from({ length: Math.min(ROWS, samples.length - start) }, (_, i) => start + i);
        const z = outputs.read(indices) as Float32Array;
        total = add(total, score(manifest.loss, indices.length, manifest.labelCount ?? manifest.output.shape[0] ?? 1, z, samples.labelsOf(indices), manifest.labels.shape[0]));
      }
      return total;
    } finally {
      outputs.close();
    }
  });
}
