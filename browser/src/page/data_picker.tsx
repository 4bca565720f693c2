/** Where a person says what to learn from. Nothing of it leaves the browser. */
import { useEffect, useRef, useState } from "preact/hooks";

import { readArchive } from "../edge_runtime/data/archive.ts";
import { imageShape, inFolders, readPictures, type Picture } from "../edge_runtime/data/pictures.ts";
import { Samples, type Dataset } from "../edge_runtime/data/samples.ts";
import { readTable } from "../edge_runtime/data/table.ts";
import { messageOf } from "../federation/errors.ts";
import type { Manifest } from "../federation/manifest.ts";

const MOST_FILE = 2 ** 31; // bytes

interface Props {
  readonly manifest: Manifest;
  readonly picked: (data: Dataset) => Promise<void>;
}

interface Labelled {
  readonly picture: Picture;
  readonly address: string; // of the preview
}

export function DataPicker({ manifest, picked }: Props) {
  const [busy, setBusy] = useState("");
  const [wrong, setWrong] = useState("");
  const [photos, setPhotos] = useState<readonly Labelled[]>([]);
  const [camera, setCamera] = useState(false);
  const takesPictures = tryTo(() => imageShape(manifest)) !== undefined && manifest.classCount !== undefined;
  const classes = manifest.classes ?? Array.from({ length: manifest.classCount ?? 0 }, (_, number) => String(number));

  const read = async (what: string, make: () => Promise<Dataset>): Promise<void> => {
    setWrong("");
    setBusy(what);
    try {
      const data = await make();
      new Samples(data, manifest); // says what does not fit
      await picked(data);
    } catch (error) {
      setWrong(messageOf(error));
    }
    setBusy("");
  };

  const folder = (files: File[]): Promise<void> =>
    read("reading pictures", async () => {
      const found = inFolders(files);
      return readPictures("the folder", found.classes, found.pictures, manifest, (done) => setBusy(`${done} of ${found.pictures.length} pictures`));
    });

  const file = ([given]: File[]): Promise<void> =>
    read("reading the file", async () => {
      if (given!.size > MOST_FILE) throw new Error(`${given!.name} has more than ${MOST_FILE} bytes`);
      if (/\.csv$/i.test(given!.name)) return readTable(await given!.text(), given!.name, manifest);
      return readArchive(new Uint8Array(await given!.arrayBuffer()), given!.name);
    });

  const add = (content: Blob, name: string, className: string): void => {
    const picture = { className, name, content };
    setPhotos((known) => [...known, { picture, address: URL.createObjectURL(content) }]);
  };

  const label = (place: number, className: string): void =>
    setPhotos((known) => known.map((each, at) => (at === place ? { ...each, picture: { ...each.picture, className } } : each)));

  const use = (): Promise<void> => {
    const pictures = photos.map(({ picture }) => picture).filter(({ className }) => className);
    return read("reading pictures", () => readPictures("your photos", classes, pictures, manifest));
  };

  return (
    <div>
      <div class="row">
        {takesPictures && <FileButton title="A folder of photos by class" folder files={folder} />}
        {takesPictures && (
          <FileButton title="Photos to label" accept="image/*" many files={(found) => found.forEach((each) => add(each, each.name, ""))} />
        )}
        {takesPictures && <button onClick={() => setCamera(!camera)}>{camera ? "Close the camera" : "Camera"}</button>}
        <FileButton title="A file: .npz or .csv" accept=".npz,.csv" files={file} />
      </div>
      {camera && <Camera classes={classes} taken={(content, className) => add(content, `photo ${photos.length + 1}`, className)} />}
      {photos.length > 0 && (
        <>
          <ul class="photos">
            {photos.map(({ picture, address }, place) => (
              <li key={address}>
                <img src={address} alt={picture.name} />
                <select aria-label={`Class of ${picture.name}`} value={picture.className} onChange={(event) => label(place, event.currentTarget.value)}>
                  <option value="">leave out</option>
                  {classes.map((each) => (
                    <option key={each} value={each}>{each}</option>
                  ))}
                </select>
              </li>
            ))}
          </ul>
          <button onClick={() => void use()}>Use these photos</button>
        </>
      )}
      <p class="quiet" role="status">{busy && `${busy} …`}</p>
      {wrong && <p class="wrong" role="alert">{wrong}</p>}
    </div>
  );
}

interface FileButtonProps {
  readonly title: string;
  readonly files: (found: File[]) => unknown;
  readonly accept?: string;
  readonly many?: boolean;
  readonly folder?: boolean;
}

function FileButton({ title, files, accept, many, folder }: FileButtonProps) {
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => {
    if (folder) input.current!.webkitdirectory = true;
  }, [folder]);
  return (
    <label class="button">
      {title}
      <input
        ref={input}
        class="hidden"
        type="file"
        accept={accept}
        multiple={many ?? false}
        onChange={(event) => {
          const found = [...(event.currentTarget.files ?? [])];
          event.currentTarget.value = ""; // the same may be picked again
          if (found.length > 0) files(found);
        }}
      />
    </label>
  );
}

function Camera({ classes, taken }: { readonly classes: readonly string[]; readonly taken: (content: Blob, className: string) => void }) {
  const video = useRef<HTMLVideoElement>(null);
  const [className, setClassName] = useState(classes[0] ?? "");
  const [wrong, setWrong] = useState("");
  useEffect(() => {
    let stream: MediaStream | undefined;
    let gone = false;
    navigator.mediaDevices
      .getUserMedia({ video: { facingMode: "environment" } })
      .then((found) => {
        stream = found;
        if (gone) return found.getTracks().forEach((track) => track.stop());
        video.current!.srcObject = found;
        return video.current!.play();
      })
      .catch((error: unknown) => setWrong(`the camera cannot be used: ${messageOf(error)}`));
    return () => {
      gone = true;
      stream?.getTracks().forEach((track) => track.stop());
    };
  }, []);
  const take = async (): Promise<void> => {
    const { videoWidth, videoHeight } = video.current!;
    const canvas = new OffscreenCanvas(videoWidth, videoHeight);
    canvas.getContext("2d")!.drawImage(video.current!, 0, 0);
    taken(await canvas.convertToBlob({ type: "image/png" }), className);
  };
  if (wrong) return <p class="wrong" role="alert">{wrong}</p>;
  return (
    <div>
      <video ref={video} muted playsInline aria-label="What the camera sees" />
      <div class="row">
        <select aria-label="Class of the next photo" value={className} onChange={(event) => setClassName(event.currentTarget.value)}>
          {classes.map((each) => (
            <option key={each}>{each}</option>
          ))}
        </select>
        <button onClick={() => void take()}>Take a photo</button>
      </div>
    </div>
  );
}

function tryTo<T>(make: () => T): T | undefined {
  try {
    return make();
  } catch {
    return undefined;
  }
}
