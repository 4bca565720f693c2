/** Files of the page's own for activations that do not fit memory: no other page sees them, and they are removed. */
import { EmbraceError, messageOf } from "../federation/errors.ts";
import type { Room } from "./activations.ts";

const PREFIX = "activations-";

export class DiskFull extends EmbraceError {
  override readonly reason = "disk_full";
}

/** Make room in a file; works in a worker only. */
export async function inFile(bytes: number): Promise<Room> {
  const folder = await navigator.storage.getDirectory();
  const name = PREFIX + crypto.randomUUID();
  try {
    const handle = await (await folder.getFileHandle(name, { create: true })).createSyncAccessHandle();
    handle.truncate(bytes);
    return {
      read: (into, at) => void handle.read(into, { at }),
      write: (from, at) => {
        if (handle.write(from, { at }) !== from.length) throw new DiskFull(`no room for ${bytes} bytes of activations`);
      },
      close: () => {
        handle.close();
        void folder.removeEntry(name).catch(() => {}); // a later start removes it
      },
    };
  } catch (error) {
    throw new DiskFull(`no room for ${bytes} bytes of activations: ${messageOf(error)}`);
  }
}

/** Remove what an earlier worker left behind. */
export async function removeLeftovers(): Promise<void> {
  const folder = await navigator.storage.getDirectory();
  for await (const name of folder.keys()) {
    if (name.startsWith(PREFIX)) await folder.removeEntry(name).catch(() => {}); // one that is open stays
  }
}
