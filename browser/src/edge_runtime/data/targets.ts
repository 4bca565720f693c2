/** Labels: checked against the model's loss before anything trains. */
import { DataError } from "../../federation/errors.ts";
import { classifies, type Loss, type Manifest } from "../../federation/manifest.ts";
import { product } from "../../federation/space.ts";
import { sameButForOnes, shapeText, type Stored } from "./arrays.ts";
import { value } from "./input_adapter.ts";

export type Labels = BigInt64Array<ArrayBuffer> | Float32Array<ArrayBuffer>;

/**
 * Return the names of all classes in the order of their numbers.
 *
 * A bundle that has names decides, and others are refused. Else the names found here get numbers by their order, which
 * devices have to share: all must be there.
 */
export function orderClasses(name: string, what: string, found: readonly string[], manifest: Manifest): readonly string[] {
  const { classes, classCount } = manifest;
  if (classes !== undefined) {
    const others = found.filter((each) => !classes.includes(each));
    if (others.length === 0) return classes;
    throw new DataError(
      `${name} has ${what} ${shown(others)} that are no classes of the model '${manifest.name}': expected ${shown(classes)}`,
    );
  }
  if (found.length === classCount) return found;
  throw new DataError(
    `${name} has ${found.length} ${what} (${shown(found)}), the model '${manifest.name}' has ${classCount ?? "no"} classes: ` +
      "classes are numbered by the order of their names, so all must be there",
  );
}

function shown(names: readonly string[]): string {
  return names.slice(0, 10).join(", ").slice(0, 200) + (names.length > 10 ? ", …" : "") || "none";
}

/** Check the labels of `count` samples and turn them into what the training graph takes. */
export function fitTargets(name: string, labels: Stored, count: number, manifest: Manifest): Labels {
  if (labels.shape[0] !== count) throw new DataError(`${name}: ${count} inputs but ${labels.shape[0] ?? "no"} labels`);
  const { loss } = manifest;
  const stored = labels.shape.slice(1);
  if (!sameButForOnes(stored, manifest.labels.shape)) {
    const oneHot = classifies(loss) && stored.join() === String(manifest.labelCount);
    throw new DataError(
      `${name} has labels of ${shapeText(stored)} per sample, the model '${manifest.name}' takes ` +
        `${shapeText(manifest.labels.shape)} (${loss.name})${oneHot ? ": class numbers, not one-hot rows" : ""}`,
    );
  }
  const each = product(stored);
  const numbers = Float64Array.from(labels.data as ArrayLike<number | bigint>, (raw) => value(labels.dtype, raw as number));
  const check = classifies(loss) ? classNumber(manifest) : number(loss);
  numbers.forEach((found, at) => {
    const wrong = check(found);
    if (wrong) throw new DataError(`${name}: sample ${Math.floor(at / each)} has label ${found}, ${wrong}`);
  });
  if (manifest.labels.dtype === "int64") return BigInt64Array.from(numbers, (found) => BigInt(found));
  if (manifest.labels.dtype === "float32") return Float32Array.from(numbers);
  throw new DataError(`this agent has no labels of type ${manifest.labels.dtype}`);
}

type Check = (label: number) => string | undefined;

function classNumber(manifest: Manifest): Check {
  const classes = manifest.labelCount!;
  const ignored = manifest.loss.ignoreIndex;
  return (label) => {
    if (label === ignored || (label >= 0 && label < classes && Number.isInteger(label))) return undefined;
    const extra = ignored === undefined ? "" : `, or ${ignored} for none`;
    const guess = label === classes ? "; are the labels counted from 1?" : "";
    return `the model '${manifest.name}' has classes 0 to ${classes - 1}${extra}${guess}`;
  };
}

function number({ name, ignoreIndex }: Loss): Check {
  return (label) => {
    if (label === ignoreIndex) return undefined;
    if (name !== "bce_with_logits") return Number.isFinite(Math.fround(label)) ? undefined : `${name} takes finite numbers`;
    return label >= 0 && label <= 1 ? undefined : "bce_with_logits takes 0 to 1";
  };
}
