/** Numbers and times for people. */

export function size(bytes: number | null | undefined): string {
  if (bytes == null || !Number.isFinite(bytes)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; bytes >= 999.5 && at < units.length - 1; at += 1) bytes /= 1000;
  return `${at === 0 || bytes >= 99.5 ? Math.round(bytes) : Number(bytes.toPrecision(2))} ${units[at]}`;
}

export function duration(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 99.5) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function ago(at: number | null | undefined, now: number): string {
  if (at == null) return "never";
  const past = Math.max(0, now - at);
  return past < 5 ? "now" : `${coarse(past)} ago`;
}

function coarse(seconds: number): string {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 86400 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

export function moment(at: number): string {
  return new Date(1000 * at).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

export const percent = (share: number): string => `${(100 * share).toFixed(1)} %`;

export function count(value: number, what: string): string {
  return `${value.toLocaleString("en")} ${what}${value === 1 ? "" : "s"}`;
}

export function compact(value: number): string {
  return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value);
}

/** A score as its name asks for it. */
export function score(name: string, value: number): string {
  return name.includes("accuracy") ? percent(value) : String(Number(value.toPrecision(4)));
}

export function median(values: readonly number[]): number | undefined {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length === 0 ? undefined : sorted[Math.floor((sorted.length - 1) / 2)];
}
