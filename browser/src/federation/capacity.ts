/** What training from a boundary costs: computed from the manifest alone, or measured by this device. */
import type { Boundary, Manifest } from "./manifest.ts";
import { product, type Kind } from "./space.ts";

// Of a bundle without the lifetimes of its graphs: the runtime's own structures, and what its arena cannot use.
const GRAPH_BYTES = 24;
const ARENA = 1.15;

/** Bytes that a device measured for training with a graph, beside its idle runtime. */
export interface MeasuredNeed {
  readonly graph: string; // sha256
  readonly batch: number;
  readonly bytes: number;
}

/** Predict the bytes of training from a boundary, beside the idle runtime. */
export function predictedPeak(manifest: Manifest, boundary: Boundary, batch: number, buffers = 1): number {
  const weights = count(manifest, boundary, "weight");
  const statistics = count(manifest, boundary, "statistic");
  const vectors = 4 * ((2 + buffers) * weights + 2 * statistics); // parameters, gradients, what local rules hold
  if (boundary.stepMemory === undefined) {
    return Math.trunc(ARENA * (vectors + 8 * boundary.activations * batch + GRAPH_BYTES * (boundary.train?.bytes ?? 0)));
  }
  const entry = manifest.entry(boundary);
  return vectors + batch * (entry.dtype.endsWith("64") ? 8 : 4) * product(entry.shape) + between(boundary.stepMemory, batch);
}

/** The bytes of training from a boundary: measured, else predicted. */
export function needOf(manifest: Manifest, boundary: Boundary, batch: number, needs: readonly MeasuredNeed[], buffers = 1): number {
  const own = needs.filter((need) => need.graph === boundary.train?.sha256 && need.batch === batch);
  return own.length > 0 ? Math.max(...own.map((need) => need.bytes)) : predictedPeak(manifest, boundary, batch, buffers);
}

/** The boundary nearest to the input that fits so many bytes, and what it needs. */
export function largestFitting(manifest: Manifest, batch: number, room: number, needs: readonly MeasuredNeed[]): { boundary: Boundary; need: number } | undefined {
  const ordinary = manifest.boundaries.filter((boundary) => boundary.narrow === undefined && boundary.train !== undefined);
  return ordinary
    .sort((a, b) => a.layer - b.layer || b.activations - a.activations)
    .map((boundary) => ({ boundary, need: needOf(manifest, boundary, batch, needs) }))
    .find(({ need }) => need <= room);
}

function count(manifest: Manifest, boundary: Boundary, kind: Kind): number {
  const layers = manifest.spaceOf(boundary).layers.slice(boundary.layer);
  return layers.flat().reduce((sum, p) => sum + (p.kind === kind ? product(p.shape) : 0), 0);
}

/** Read a batch size off a table: on the line between its neighbours, or on the last line continued. */
function between(pairs: readonly (readonly number[])[], batch: number): number {
  if (pairs.length === 1) return Math.floor((pairs[0]![1]! * batch) / pairs[0]![0]!);
  const above = pairs.findIndex(([size]) => size! >= batch);
  const place = Math.min(Math.max(above < 0 ? pairs.length : above, 1), pairs.length - 1);
  const [low, less] = pairs[place - 1] as [number, number];
  const [high, more] = pairs[place] as [number, number];
  return Math.max(0, less + Math.floor(((more - less) * (batch - low)) / (high - low)));
}
