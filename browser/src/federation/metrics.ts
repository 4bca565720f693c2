/** Loss and accuracy from a model's outputs, as the training graphs define them: federation/metrics.py. */
import type { Loss } from "./manifest.ts";

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

/** Score one batch of `count` samples. Cross-entropy has its classes along the first axis of an output. */
export function score(loss: Loss, count: number, classes: number, z: ArrayLike<number>, labels: ArrayLike<number | bigint>): Score {
  if (loss.name === "cross_entropy") return crossEntropy(loss, count, classes, z, labels);
  let found = { ...NOTHING, counted: labels.length, classifies: loss.name === "bce_with_logits" };
  for (let i = 0; i < labels.length; i++) {
    const [output, label] = [z[i]!, Number(labels[i])];
    if (loss.name === "mse") {
      found.loss += (output - label) ** 2;
      continue;
    }
    const target = label * (1 - loss.labelSmoothing) + loss.labelSmoothing / 2;
    found.loss += Math.max(output, 0) - output * target + Math.log1p(Math.exp(-Math.abs(output)));
    found.correct += Number(output > 0 === label > 0.5);
  }
  return found;
}

function crossEntropy(loss: Loss, count: number, classes: number, z: ArrayLike<number>, labels: ArrayLike<number | bigint>): Score {
  const each = labels.length / count; // labels of a sample, which stand behind the classes
  const found = { ...NOTHING, classifies: true };
  for (let i = 0; i < labels.length; i++) {
    const label = Number(labels[i]);
    if (label === loss.ignoreIndex) continue;
    const at = (of: number): number => z[(Math.floor(i / each) * classes + of) * each + (i % each)]!;
    let [best, total, sum] = [0, 0, 0];
    for (let of = 1; of < classes; of++) if (at(of) > at(best)) best = of;
    for (let of = 0; of < classes; of++) total += Math.exp(at(of) - at(best));
    const log = (of: number): number => at(of) - at(best) - Math.log(total);
    for (let of = 0; of < classes && loss.labelSmoothing; of++) sum += log(of);
    found.loss += -(1 - loss.labelSmoothing) * log(label) - (loss.labelSmoothing * sum) / classes;
    found.correct += Number(best === label);
    found.counted++;
  }
  return found;
}
