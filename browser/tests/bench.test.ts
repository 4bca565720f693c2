/** What a page measures of itself: the parts of real steps, in the document that the Python reads. */
import { beforeAll, describe, expect, test } from "vitest";

import { benchBoundary } from "../src/edge_runtime/bench.ts";
import type { RemoteBundle } from "../src/edge_runtime/remote.ts";
import { quantile, shortText, tierBoundaries, tiersOf } from "../src/federation/benchmark.ts";
import type { Boundary, Layer } from "../src/federation/manifest.ts";
import type { Slice } from "../src/federation/space.ts";
import { weightsHeader } from "../src/federation/wire.ts";
import { Bundle, golden, loadForNode } from "./values.ts";

const names = [...new Set(Object.values<any>(golden("rounds.json")).map(({ bundle }) => String(bundle)))];

/** A bundle as a coordinator would serve it. */
function served(bundle: Bundle): RemoteBundle {
  const { manifest } = bundle;
  const dataStart = weightsHeader(manifest.space).length;
  return {
    manifest,
    dataStart,
    trainingGraph: async (boundary: Boundary) => bundle.file(boundary.train!.name),
    layerGraph: async (layer: Layer) => bundle.file(layer.forward.name),
    weights: async (_: unknown, { start, stop }: Slice) => bundle.file("weights.safetensors").slice(dataStart + 4 * start, dataStart + 4 * stop),
  } as unknown as RemoteBundle;
}

beforeAll(async () => void (await loadForNode()));

describe("bench", () => {
  test.each(names)("every part of %s", async (name) => {
    const bundle = new Bundle(name);
    const { manifest } = bundle;
    for (const boundary of tierBoundaries(manifest)) {
      const offer = { id: "", job: "", bundle: "", version: 0, leaseUntil: 0, work: {} };
      const what = { boundary: boundary.name, batch: 3, iterations: 3 };
      const { seconds, memory, problem, tiers } = await benchBoundary(served(bundle), offer, what, () => 1000);
      expect([problem, tiers]).toEqual(["", tiersOf(manifest, boundary.name)]);
      expect(Object.values(seconds!).filter((value) => value !== null).every((value) => Number.isFinite(value) && value >= 0)).toBe(true);
      expect(seconds!.training).toBeGreaterThan(0);
      expect(seconds!.frozen_forward > 0).toBe(boundary.layer > 0); // only a device with frozen layers runs them
      expect(seconds!.low <= seconds!.batch && seconds!.batch <= seconds!.high).toBe(true);
      expect(memory).toBeGreaterThan(1000);
    }
  });

  test("quartiles are numpy's", () => {
    expect([0.25, 0.5, 0.75].map((share) => quantile([8, 1, 4, 2], share))).toEqual([1.75, 3, 5]);
    expect(quantile([7], 0.75)).toBe(7);
  });

  test("texts print and are short", () => {
    expect(shortText("Mozilla/5.0 (X11; Linux)\u001b[2J\u202e ö")).toBe("Mozilla/5.0 (X11; Linux)[2J ö");
    expect(shortText("x".repeat(300))).toHaveLength(200);
  });
});
