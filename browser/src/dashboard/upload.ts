/** Send a bundle, file by file, as the command line does. */
import { ask } from "./api.ts";

const MANIFEST = "manifest.json";
const OTHERS = ["signature.json"]; // that belong to a bundle without being named in it

interface Named {
  readonly name: string;
  readonly bytes: number;
}

/** Send the files of a bundle's folder and return the sha256 of its manifest. */
export async function sendBundle(picked: readonly File[], told: (done: number, total: number) => void): Promise<string> {
  const files = new Map(picked.map((file) => [inside(file), file]));
  const manifest = files.get(MANIFEST);
  if (manifest === undefined) throw new Error(`This folder has no ${MANIFEST}; expected one that embrace export wrote.`);
  if (globalThis.crypto?.subtle === undefined) throw new Error("Without https this browser offers no checksums; use embrace job create.");
  const content = await manifest.arrayBuffer();
  const digest = Array.from(new Uint8Array(await crypto.subtle.digest("SHA-256", content)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const wanted = [...named(JSON.parse(new TextDecoder().decode(content)))].map((ref) => ref.name);
  const missing = wanted.find((name) => !files.has(name));
  if (missing !== undefined) throw new Error(`The folder has no file ${missing}, which its manifest names.`);
  const all = [MANIFEST, ...new Set(wanted), ...OTHERS.filter((name) => files.has(name))];
  for (const [done, name] of all.entries()) {
    told(done, all.length);
    await ask(`/v1/bundles/${digest}/files/${name.split("/").map(encodeURIComponent).join("/")}`, "PUT", files.get(name)!);
  }
  await ask(`/v1/bundles/${digest}`, "POST");
  return digest;
}

function inside(file: File): string {
  return file.webkitRelativePath.split("/").slice(1).join("/") || file.name;
}

/** Every file that a manifest names, wherever in it. */
function* named(value: unknown): Generator<Named> {
  if (typeof value !== "object" || value === null) return;
  const found = value as Partial<Named> & { sha256?: unknown };
  if (typeof found.name === "string" && typeof found.bytes === "number" && typeof found.sha256 === "string") yield found as Named;
  for (const part of Object.values(value)) yield* named(part);
}
