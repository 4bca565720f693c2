/**
 * What a device trains, as text: a boundary, a tier, a narrow boundary, several of these, or the front of the model.
 *
 *     layer3.0              from there to the output
 *     stem@0.45|stem@0.2    in every step one of these widths, drawn anew; the first is the widest
 *     ..layer2.0            everything in front of layer2.0, with the graph of the whole model
 */
import { BundleError } from "./errors.ts";
import type { Boundary, Manifest } from "./manifest.ts";

export class Coverage {
  constructor(
    readonly boundary: Boundary,
    readonly firstLayer: number,
    readonly endLayer: number,
    readonly ordered: readonly Boundary[] = [], // one of these in every step, widest first
  ) {}

  /** All graphs that a device needs for it. */
  get graphs(): readonly Boundary[] {
    return this.ordered.length > 0 ? this.ordered : [this.boundary];
  }

  /** Whether a layer is changed by training. */
  trains(layer: number): boolean {
    return this.firstLayer <= layer && layer < this.endLayer;
  }
}

export function coverage(manifest: Manifest, text: string): Coverage {
  const count = manifest.layers.length;
  if (text.includes("|")) {
    const ordered = text.split("|").map((name) => manifest.boundary(name));
    const widths = ordered.map((boundary) => boundary.width ?? 1);
    if (widths.some((width, place) => place > 0 && width >= widths[place - 1]!)) {
      throw new BundleError(`coverage '${text}': expected boundaries of all layers, widest first, each once`);
    }
    return new Coverage(ordered[0]!, 0, count, ordered);
  }
  if (!text.startsWith("..")) {
    const boundary = manifest.boundary(text);
    return new Coverage(boundary, boundary.layer, count);
  }
  const end = manifest.layers.findIndex((layer) => layer.name === text.slice(2));
  if (end < 1) throw new BundleError(`coverage '${text}': expected a layer behind the first`);
  return new Coverage(manifest.whole, 0, end);
}
