/** A job that a person may help with, and what of its model fits this device. */
import type { OpenJob } from "../edge_runtime/client.ts";
import { largestFitting } from "../federation/capacity.ts";
import { loads, type Manifest } from "../federation/manifest.ts";

export interface Offered {
  readonly job: OpenJob;
  readonly manifest: Manifest;
}

/** What would be trained with so much memory. */
export interface Fit {
  readonly from: string; // the first layer that is trained
  readonly layers: number; // of which
  readonly trained: number;
  readonly need: number; // bytes
}

export function offer(job: OpenJob): Offered {
  return { job, manifest: loads(JSON.stringify(job.manifest)) };
}

export function fitOf({ job, manifest }: Offered, memory: number): Fit | undefined {
  const found = largestFitting(manifest, job.batch, memory, []);
  if (found === undefined) return undefined;
  const layers = manifest.layers.length;
  return { from: found.boundary.name, layers, trained: layers - found.boundary.layer, need: found.need };
}
