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
  const [next, setNext] = useState(""); // class of the photos that come
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

  const add = (content: Blob, name: string): void => {
    const picture = { className: next, name, content };
    setPhotos((known) => [...known, { picture, address: URL.createObjectURL(content) }]);
  };
  const shown = useRef(photos);
  shown.current = photos;
  useEffect(() => () => shown.current.forEach(({ address }) => URL.revokeObjectURL(address)), []);

  const label = (place: number, className: string): void =>
    setPhotos((known) => known.map((each, at) => (at === place ? { ...each, picture: { ...each.picture, className } } : each)));

  const pictures = photos.map(({ picture }) => picture).filter(({ className }) => className);
  const use = (): Promise<void> => {
    return read("reading pictures", () => readPictures("your photos", classes, pictures, manifest));
  };

  return (
    <div>
      <div class="ways">
        {takesPictures && <FileButton title="A folder of photos" hint="with a sub-folder for each class" folder files={folder} />}
        {takesPictures && (
          <FileButton title="Photos to label" hint="one by one, here" accept="image/*" many files={(found) => found.forEach((each) => add(each, each.name))} />
        )}
        {takesPictures && (
          <button aria-expanded={camera} onClick={() => setCamera(!camera)}>
            <b>{camera ? "Close the camera" : "Camera"}</b>
            <small>take photos and label them</small>
          </button>
        )}
        <FileButton title="A file" hint=".npz or .csv" accept=".npz,.csv" files={file} />
      </div>
      {(camera || photos.length > 0) && (
        <label class="field">
          <span>Class of the next photo</span>
          <Classes classes={classes} none="choose later" value={next} set={setNext} />
        </label>
      )}
      {camera && <Camera taken={(content) => add(content, `photo ${photos.length + 1}`)} />}
      {photos.length > 0 && (
        <>
          <ul class="photos">
            {photos.map(({ picture, address }, place) => (
              <li key={address}>
                <img src={address} alt={picture.name} />
                <Classes classes={classes} none="leave out" label={`Class of ${picture.name}`} value={picture.className} set={(each) => label(place, each)} />
              </li>
            ))}
          </ul>
          <p class="quiet" role="status">{pictures.length} of {photos.length} photos have a class; the others are left out.</p>
          <button disabled={pictures.length === 0} onClick={() => void use()}>Use these photos</button>
        </>
      )}
      <p class="quiet" role="status">{busy && `${busy} …`}</p>
      {wrong && <p class="wrong" role="alert">{wrong}</p>}
    </div>
  );
}

interface FileButtonProps {
  readonly title: string;
  readonly hint: string;
  readonly files: (found: File[]) => unknown;
  readonly accept?: string;
  readonly many?: boolean;
  readonly folder?: boolean;
}

function FileButton({ title, hint, files, accept, many, folder }: FileButtonProps) {
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => {
    if (folder) input.current!.webkitdirectory = true;
  }, [folder]);
  return (
    <label class="button">
      <b>{title}</b>
      <small>{hint}</small>
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

interface ClassesProps {
  readonly classes: readonly string[];
  readonly none: string; // what no class is called
  readonly value: string;
  readonly set: (className: string) => void;
  readonly label?: string;
}

function Classes({ classes, none, value, set, label }: ClassesProps) {
  return (
    <select aria-label={label} value={value} onChange={(event) => set(event.currentTarget.value)}>
      <option value="">{none}</option>
      {classes.map((each) => (
        <option key={each} value={each}>{each}</option>
      ))}
    </select>
  );
}

function Camera({ taken }: { readonly taken: (content: Blob) => void }) {
  const video = useRef<HTMLVideoElement>(null);
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
    taken(await canvas.convertToBlob({ type: "image/png" }));
  };
  if (wrong) return <p class="wrong" role="alert">{wrong}</p>;
  return (
    <div>
      <video ref={video} muted playsInline aria-label="What the camera sees" />
      <button onClick={() => void take()}>Take a photo</button>
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
