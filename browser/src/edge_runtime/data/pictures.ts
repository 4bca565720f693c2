/** Photos as samples: decoded by the browser, cut to the size that the model takes, kept as bytes C×H×W. */
import { DataError, EmptyData, messageOf } from "../../federation/errors.ts";
import type { Manifest } from "../../federation/manifest.ts";
import { shapeText } from "./arrays.ts";
import { resize } from "./resample.ts";
import type { Dataset } from "./samples.ts";
import { byCodePoint } from "./table.ts";
import { orderClasses } from "./targets.ts";

const ENDINGS = /\.(bmp|gif|jpe?g|png|webp)$/i;

export interface Picture {
  readonly className: string;
  readonly name: string;
  readonly content: Blob;
}

/** C×H×W of the pictures that a model takes. */
export function imageShape(manifest: Manifest): readonly [number, number, number] {
  const { shape, dtype } = manifest.input;
  const found = shape.length === 2 ? [1, ...shape] : shape;
  if (found.length !== 3 || ![1, 3].includes(found[0]!) || dtype !== "float32") {
    throw new DataError(`the model '${manifest.name}' takes ${shapeText(shape)} (${dtype}), no pictures`);
  }
  return found as unknown as readonly [number, number, number];
}

/** Find pictures in the files of a folder: the folder that a file lies in is its class. */
export function inFolders(files: Iterable<File>): { classes: string[]; pictures: Picture[] } {
  const classes = new Set<string>();
  const pictures: Picture[] = [];
  for (const file of files) {
    const parts = (file.webkitRelativePath || file.name).split("/");
    const className = parts.at(-2);
    if (parts.length < 3 || className === undefined || parts.some((part) => part.startsWith("."))) continue;
    classes.add(className);
    if (ENDINGS.test(file.name)) pictures.push({ className, name: parts.slice(1).join("/"), content: file });
  }
  const sorted = [...classes].sort(classOrder);
  const place = (picture: Picture): number => sorted.indexOf(picture.className);
  pictures.sort((a, b) => place(a) - place(b) || byCodePoint(a.name, b.name));
  return { classes: sorted, pictures };
}

/** Decode pictures of these classes; `report` hears how many are done. */
export async function readPictures(
  name: string,
  found: readonly string[],
  pictures: readonly Picture[],
  manifest: Manifest,
  report: (done: number) => void = () => {},
): Promise<Dataset> {
  const shape = imageShape(manifest);
  const classes = orderClasses(name, "classes", found, manifest);
  if (pictures.length === 0) throw new EmptyData(`${name} has no pictures`);
  const each = shape[0] * shape[1] * shape[2];
  const data = new Uint8Array(pictures.length * each);
  for (const [place, picture] of pictures.entries()) {
    try {
      data.set(await decode(picture.content, shape), place * each);
    } catch (error) {
      throw new DataError(`${picture.name} cannot be read as a picture: ${messageOf(error)}`);
    }
    report(place + 1);
  }
  const labels = Float64Array.from(pictures, (picture) => classes.indexOf(picture.className));
  return {
    name,
    inputs: { dtype: "uint8", shape: [pictures.length, ...shape], data },
    labels: { dtype: "float64", shape: [pictures.length], data: labels },
    classNames: classes,
  };
}

/** Decode one picture to bytes C×H×W. */
export async function decode(content: Blob, [channels, height, width]: readonly [number, number, number]): Promise<Uint8Array> {
  const bitmap = await createImageBitmap(content, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { willReadFrequently: true })!;
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  return planes(resize(colours(data, channels), canvas.height, canvas.width, height, width), channels);
}

/** Take red, green and blue, or grey as Pillow computes it. */
function colours(rgba: Uint8ClampedArray, channels: number): Uint8Array {
  const found = new Uint8Array((rgba.length / 4) * channels);
  for (let pixel = 0; pixel < rgba.length / 4; pixel++) {
    const [red, green, blue] = [rgba[4 * pixel]!, rgba[4 * pixel + 1]!, rgba[4 * pixel + 2]!];
    if (channels === 1) found[pixel] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16;
    else found.set([red, green, blue], 3 * pixel);
  }
  return found;
}

function planes(pixels: Uint8Array, channels: number): Uint8Array {
  const area = pixels.length / channels;
  return Uint8Array.from(pixels, (_, at) => pixels[(at % area) * channels + Math.floor(at / area)]!);
}

/** Sort numbers first, by their value: 2 before 10. */
export function classOrder(a: string, b: string): number {
  const [left, right] = [/^\d+$/.test(a), /^\d+$/.test(b)];
  if (left && right) return Number(a) - Number(b) || byCodePoint(a, b);
  return left === right ? byCodePoint(a, b) : left ? -1 : 1;
}
