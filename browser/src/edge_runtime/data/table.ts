/** .csv files: one sample per line, one column of labels, the others are the features in order. */
import { DataError, EmptyData } from "../../federation/errors.ts";
import { isFloat } from "./arrays.ts";
import type { Manifest } from "../../federation/manifest.ts";
import type { Dataset } from "./samples.ts";
import { orderClasses } from "./targets.ts";

const LABEL_NAMES = ["label", "target", "class", "y"];

/** Read features and labels; labels that are words become the places of their names among all. */
export function readTable(text: string, name: string, manifest: Manifest): Dataset {
  const lines = rows(text.replace(/^\ufeff/, ""), name);
  if (lines.length === 0) throw new EmptyData(`${name} has no samples`);
  const { number: firstLine, cells: first } = lines[0]!;
  const width = first.length;
  if (width < 2) throw new DataError(`${name}: line ${firstLine} has one column, expected features and a label`);
  const lower = first.map((cell) => cell.trim().toLowerCase());
  const known = LABEL_NAMES.map((each) => lower.indexOf(each)).find((place) => place >= 0);
  const answer = known !== undefined && lower[known] === "y" && lower.every((cell) => cell === "y" || isNumber(cell));
  const label = known === undefined || answer ? width - 1 : known;
  const header = (known !== undefined && !answer) || !lower.every((cell, place) => place === label || isNumber(cell));
  const samples = header ? lines.slice(1) : lines;
  if (samples.length === 0) throw new EmptyData(`${name} has no samples`);
  const column = (place: number): string => `column ${place + 1}${header ? ` (${first[place]!.trim()})` : ""}`;
  const features = new Float64Array(samples.length * (width - 1));
  const labels: string[] = [];
  samples.forEach(({ number, cells }, sample) => {
    if (cells.length !== width) throw new DataError(`${name}: line ${number} has ${cells.length} columns, expected ${width}`);
    let at = sample * (width - 1);
    cells.forEach((cell, place) => {
      if (place === label) return void labels.push(cell.trim());
      const found = isNumber(cell) ? Number(cell) : NaN;
      if (!Number.isFinite(Math.fround(found)) || (!isFloat(manifest.input.dtype) && !Number.isSafeInteger(found))) {
        const kind = isFloat(manifest.input.dtype) ? "a finite number" : "a whole number";
        throw new DataError(`${name}: line ${number}, ${column(place)}: expected ${kind}, got '${cell.trim()}'`);
      }
      features[at++] = found;
    });
  });
  const shape = [samples.length, width - 1];
  const whole = !isFloat(manifest.input.dtype);
  const inputs = whole
    ? { dtype: "int64" as const, shape, data: BigInt64Array.from(features, (each) => BigInt(each)) }
    : { dtype: "float32" as const, shape, data: Float32Array.from(features) };
  const lineOf = (text: string): number | string => samples[labels.indexOf(text)]?.number ?? "?";
  return { name, inputs, ...labelNumbers(name, labels, column(label), lineOf, manifest) };
}

type Numbered = Pick<Dataset, "labels" | "classNames">;

function labelNumbers(
  name: string,
  labels: readonly string[],
  column: string,
  lineOf: (text: string) => number | string,
  manifest: Manifest,
): Numbered {
  const texts = [...new Set(labels)].sort(byCodePoint);
  const words = texts.filter((text) => !isNumber(text));
  const shape = [labels.length];
  const known = manifest.classes !== undefined && texts.every((text) => manifest.classes!.includes(text)); // also numbers
  if (words.length === 0 && !known) return { labels: { dtype: "float64", shape, data: Float64Array.from(labels, Number) } };
  if (!known && (words.length < texts.length || manifest.classCount === undefined || words.includes(""))) {
    const wanted = manifest.classCount !== undefined && words.length === texts.length ? "a class" : "a number";
    throw new DataError(`${name}: line ${lineOf(words[0]!)}, ${column}: expected ${wanted}, got '${words[0]}'`);
  }
  const names = orderClasses(name, "names of classes", texts, manifest);
  const places = new Map(names.map((word, place) => [word, place]));
  const data = Float64Array.from(labels, (text) => places.get(text)!);
  return { labels: { dtype: "float64", shape, data }, classNames: names };
}

/** Order words as Python does: by code points. */
export function byCodePoint(a: string, b: string): number {
  const [left, right] = [[...a], [...b]];
  for (let at = 0; at < Math.min(left.length, right.length); at++) {
    const difference = left[at]!.codePointAt(0)! - right[at]!.codePointAt(0)!;
    if (difference) return difference;
  }
  return left.length - right.length;
}

function isNumber(cell: string): boolean {
  return /^\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*$/i.test(cell) || /^\s*[+-]?(inf|infinity|nan)\s*$/i.test(cell);
}

/** Split into cells; quotes may hold delimiters, line ends and doubled quotes. Empty lines are skipped. */
function rows(text: string, name: string): { number: number; cells: string[] }[] {
  const head = text.split(/\r?\n/).find((line) => line.trim()) ?? "";
  const delimiter = [",", ";", "\t"].reduce((best, each) => (head.split(each).length > head.split(best).length ? each : best));
  const found: { number: number; cells: string[] }[] = [];
  let [line, at] = [1, 0];
  while (at < text.length) {
    const cells: string[] = [];
    const number = line;
    for (let open = true; open; ) {
      let cell = "";
      if (text[at] === '"') {
        for (at++; ; at++) {
          if (at >= text.length) throw new DataError(`${name}: line ${number}: a quote is not closed`);
          if (text[at] === '"' && text[++at] !== '"') break;
          if (text[at] === "\n") line++;
          cell += text[at];
        }
      }
      const stop = end(text, at, delimiter);
      cells.push(cell + text.slice(at, stop));
      open = text[stop] === delimiter;
      at = stop + (open ? 1 : text[stop] === "\r" && text[stop + 1] === "\n" ? 2 : 1);
    }
    line++;
    if (cells.length > 1 || cells[0]!.trim()) found.push({ number, cells });
  }
  return found;
}

function end(text: string, from: number, delimiter: string): number {
  let at = from;
  while (at < text.length && text[at] !== delimiter && text[at] !== "\n" && text[at] !== "\r") at++;
  return at;
}
