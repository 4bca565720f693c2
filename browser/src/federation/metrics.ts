/** Loss and accuracy from a model's outputs, as the training graphs define them: federation/metrics.py. */
import { classifies, type Loss } from "./manifest.ts";

/** Sums over samples, so that scores of parts add up to the score of the whole. */
export interface Score {
  readonly loss: number;
  readonly correct: number;
  readonly counted: number; // labels that are not ignored
  readonly classifies: boolean; // whether `correct` means anything
}

export const NOTHING: Score = { loss: 0, correct: 0, counted: 0, classifies: false };

export function add(one: Score, other: Score): Score {
  return {
    loss: one.loss + other.loss,
    correct: one.correct + other.correct,
    counted: one.counted + other.counted,
    classifies: one.classifies || other.classifies,
  };
}

/**
 * Score one batch of `count` samples. Outputs have `classes` along their first axis, or along their last; a sample has labels
 * for `positions` positions.
 */
export function score(loss: Loss, count: number, classes: number, z: ArrayLike<number>, labels: ArrayLike<number | bigint>, positions = 1): Score {
  if (loss.name === "cosine") return cosine(count, classes, z, labels);
  if (classifies(loss)) return ofClasses(loss, count, classes, z, labels);
  const found = { ...NOTHING, classifies: loss.name === "bce_with_logits" };
  const each = labels.length / count;
  const step = loss.nextToken ? each / positions : 0; // from a position to the next one
  for (let i = 0; i < labels.length; i++) {
    const label = Number(labels[i]);
    if (i % each < step || label === loss.ignoreIndex) continue;
    const output = z[i - step]!;
    found.counted++;
    found.loss += ofNumber(loss, output, label);
    if (found.classifies) found.correct += Number(output > 0 === label > 0.5);
  }
  return found;
}

function ofNumber(loss: Loss, output: number, label: number): number {
  const error = output - label;
  if (loss.name === "mse") return error ** 2;
  if (loss.name === "huber") {
    const bent = Math.min(Math.max(error, -(loss.delta ?? 1)), loss.delta ?? 1);
    return bent * (error - bent / 2);
  }
  const target = label * (1 - loss.labelSmoothing) + loss.labelSmoothing / 2;
  return Math.max(output, 0) - output * target + Math.log1p(Math.exp(-Math.abs(output)));
}

function ofClasses(loss: Loss, count: number, classes: number, z: ArrayLike<number>, labels: ArrayLike<number | bigint>): Score {
  const each = labels.length / count; // labels of a sample, which stand behind the classes or in front of them
  const found = { ...NOTHING, classifies: true };
  for (let i = 0; i < labels.length; i++) {
    const label = Number(labels[i]);
    const place = (i % each) - Number(loss.nextToken ?? false);
    if (place < 0 || label === loss.ignoreIndex) continue;
    const sample = Math.floor(i / each);
    const at = (of: number): number => z[loss.classesLast ? (sample * each + place) * classes + of : (sample * classes + of) * each + place]!;
    let [best, total, sum] = [0, 0, 0];
    for (let of = 1; of < classes; of++) if (at(of) > at(best)) best = of;
    for (let of = 0; of < classes; of++) total += Math.exp(at(of) - at(best));
    const log = (of: number): number => at(of) - at(best) - Math.log(total);
    for (let of = 0; of < classes && loss.labelSmoothing; of++) sum += log(of);
    if (loss.name === "focal") found.loss += -((1 - Math.exp(log(label))) ** (loss.gamma ?? 2)) * log(label);
    else found.loss += -(1 - loss.labelSmoothing) * log(label) - (loss.labelSmoothing * sum) / classes;
    found.correct += Number(best === label);
    found.counted++;
  }
  return found;
}

/** One less the cosine between output and label, along the first axis of a sample. */
function cosine(count: number, width: number, z: ArrayLike<number>, labels: ArrayLike<number | bigint>): Score {
  const [each, found] = [labels.length / count, { ...NOTHING }];
  const rest = each / width;
  for (let vector = 0; vector < count * rest; vector++) {
    let [product, own, other] = [0, 0, 0];
    for (let of = 0; of < width; of++) {
      const i = Math.floor(vector / rest) * each + of * rest + (vector % rest);
      const [output, label] = [z[i]!, Number(labels[i])];
      [product, own, other] = [product + output * label, own + output ** 2, other + label ** 2];
    }
    found.loss += 1 - product / (Math.max(Math.sqrt(own), 1e-8) * Math.max(Math.sqrt(other), 1e-8));
    found.counted++;
  }
  return found;
}
