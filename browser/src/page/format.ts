/** Sizes and data in words. */
import type { Dataset } from "../edge_runtime/data/samples.ts";
import { product } from "../federation/space.ts";

export function size(bytes: number | undefined): string {
  const count = bytes ?? 0;
  return count < 1e4 ? `${count}\u00a0bytes` : count < 1e6 ? `${(count / 1e3).toFixed(0)}\u00a0kB` : `${(count / 1e6).toFixed(count < 1e7 ? 1 : 0)}\u00a0MB`;
}

/** Say how much memory a person allows: one of a few round numbers. */
export function memoryText(bytes: number): string {
  return bytes < 1e9 ? `${Math.round(bytes / 1e6)}\u00a0MB` : `${bytes / 1e9}\u00a0GB`;
}

export function percent(share: number): string {
  return `${Math.round(100 * share)}\u00a0%`;
}

export function describeData(data: Dataset): string {
  const classes = new Set(Array.from(data.labels.data as ArrayLike<number | bigint>, Number)).size;
  const shape = data.inputs.shape.slice(1).join(" × ") || "one number";
  return `${data.name}: ${data.inputs.shape[0]} samples of ${shape}${product(data.labels.shape.slice(1)) === 1 ? `, ${classes} labels` : ""}`;
}
