/** What training costs on a device, boundary by boundary: the document of federation/benchmark.py. */
import type { Boundary, Manifest } from "./manifest.ts";

/** Where the seconds of one batch go, over the iterations: medians of each part, and quartiles of the whole. */
export interface PartSeconds {
  readonly load: number;
  readonly frozen_forward: number;
  readonly activation_io: number;
  readonly training: number;
  readonly optimiser: number;
  readonly batch: number;
  readonly low: number;
  readonly high: number;
  readonly backward: null; // the runtime does not say how a step divides
}

/** What training from one boundary costs, or why it could not be measured. */
export interface BoundaryCost {
  readonly boundary: string;
  readonly tiers: readonly string[];
  readonly seconds: PartSeconds | null;
  readonly memory: number | null; // peak bytes on top of the idle runtime
  readonly problem: string;
}

export interface Benchmark {
  readonly bundle: string;
  readonly model: string;
  readonly batch: number;
  readonly iterations: number;
  readonly runtime: string;
  readonly threads: number;
  readonly costs: readonly BoundaryCost[];
  readonly processor: string;
  readonly system: string;
  readonly cores: number;
  readonly idle: number | null;
}

export const MOST_LETTERS = 200; // of every text

/** The boundaries of a bundle's tiers, input side first; without tiers the one that trains everything. */
export function tierBoundaries(manifest: Manifest): Boundary[] {
  const wanted = new Set(manifest.tiers.values());
  const found = manifest.boundaries.filter(({ name }) => wanted.has(name));
  return found.length > 0 ? found : [manifest.whole];
}

/** The tiers that train from a boundary. */
export function tiersOf(manifest: Manifest, boundary: string): string[] {
  return [...manifest.tiers].filter(([, name]) => name === boundary).map(([tier]) => tier);
}

/** A value below which so large a share of some numbers lies, between neighbours on a line, as numpy has it. */
export function quantile(values: readonly number[], share: number): number {
  const sorted = values.toSorted((a, b) => a - b);
  const place = share * (sorted.length - 1);
  const [low, high] = [sorted[Math.floor(place)]!, sorted[Math.ceil(place)]!];
  return low + (high - low) * (place - Math.floor(place));
}

/** Cut a text that people read, without anything that does not print. */
export function shortText(text: string): string {
  return text.replace(/[^\p{L}\p{M}\p{N}\p{P}\p{S} ]/gu, "").slice(0, MOST_LETTERS);
}
