/**
 * Decide whose bundles this device trains: those of the key that it met first, as ssh does with hosts.
 *
 * A bundle may have an Ed25519 signature over the sha256 of its manifest (federation/signature.py). Once one was seen,
 * another signer, or none, is refused.
 */
import { EmbraceError } from "../federation/errors.ts";
import type { Bytes } from "../federation/space.ts";

export const UNSIGNED = "unsigned";
const PREFIX = "ed25519:";

export class Untrusted extends EmbraceError {
  override readonly reason = "untrusted";
}

/** Return the signer to remember; `pinned` is the one that was remembered. */
export async function checkSigner(digest: string, signature: Bytes | undefined, pinned: string | undefined): Promise<string> {
  const signer = signature === undefined ? UNSIGNED : await signerOf(signature, digest);
  if (pinned === undefined || pinned === UNSIGNED || pinned === signer) return signer;
  throw new Untrusted(`the bundle is refused: it is ${words(signer)}, and earlier ones were ${words(pinned)}; if that is right, leave and join again`);
}

/** Return the public key that signed a bundle. */
async function signerOf(content: Bytes, digest: string): Promise<string> {
  const message = new TextEncoder().encode(`embrace bundle\n${digest}\n`);
  try {
    const { key, signature } = JSON.parse(new TextDecoder().decode(content)) as { key: string; signature: string };
    if (!key.startsWith(PREFIX)) throw new Error("another kind of key");
    const known = await crypto.subtle.importKey("raw", base64url(key.slice(PREFIX.length)), "Ed25519", false, ["verify"]);
    if (await crypto.subtle.verify("Ed25519", known, base64url(signature), message)) return key;
  } catch (error) {
    if (error instanceof DOMException && error.name === "NotSupportedError") {
      throw new Untrusted("the bundle is signed, and this browser cannot check Ed25519 signatures; use a newer one");
    }
  }
  throw new Untrusted("the bundle is refused: its signature is not right");
}

function base64url(text: string): Bytes {
  return Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
}

function words(signer: string): string {
  return signer === UNSIGNED ? "not signed" : `signed by ${signer}`;
}
