//! Lines of the input, and the file of answers, which an interrupted command continues.

use super::line::belongs;
use crate::fail::Hinted;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Lines that are not blank, with their number in the file.
pub(crate) fn lines(path: &Path) -> anyhow::Result<impl Iterator<Item = std::io::Result<(usize, Vec<u8>)>>> {
    let cannot = |error| Hinted::io("read", path, error);
    if path.is_dir() {
        return Err(cannot(std::io::ErrorKind::IsADirectory.into()).into());
    }
    let file = File::open(path).map_err(cannot)?;
    let lines = BufReader::new(file).split(b'\n').enumerate();
    let lines = lines.map(|(idx, line)| line.map(|line| (idx + 1, line)));
    Ok(lines.filter(|line| line.as_ref().map_or(true, |(_, line)| !line.trim_ascii().is_empty())))
}

/// The answers, in the order of the input.
pub(crate) struct AnswerFile {
    file: File,
    path: PathBuf,
    /// Number of complete lines.
    pub(crate) n_done: usize,
}

impl AnswerFile {
    /// Opens existing answers and drops an incomplete last line.
    pub(crate) fn open(input: &Path, path: &Path, overwrite: bool) -> anyhow::Result<AnswerFile> {
        let cannot = |error| Hinted::io("write", path, error);
        if let (Ok(from), Ok(to)) = (input.canonicalize(), path.canonicalize())
            && from == to
        {
            return Err(
                Hinted::new("the answers would overwrite the prompts", "name another file with -o").into()
            );
        }
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(overwrite);
        let mut file = options.open(path).map_err(cannot)?;
        let (mut n_done, mut end) = (0, 0);
        let mut asked = lines(input)?;
        let mut answers = BufReader::new(&file);
        let mut answer = Vec::new();
        while answers.read_until(b'\n', &mut answer).map_err(cannot)? > 0 && answer.ends_with(b"\n") {
            let Some(asked) = asked.next().transpose().map_err(|error| Hinted::io("read", input, error))?
            else {
                let message = format!("{} has more lines than {}", path.display(), input.display());
                return Err(Hinted::new(message, "name another file with -o, or pass --overwrite").into());
            };
            if !belongs(&answer, &asked.1) {
                let (line, path) = (n_done + 1, path.display());
                let message = format!("line {line} of {path} does not answer line {} of the input", asked.0);
                return Err(Hinted::new(message, "name another file with -o, or pass --overwrite").into());
            }
            (n_done, end) = (n_done + 1, end + answer.len() as u64);
            answer.clear();
        }
        drop(answers);
        file.set_len(end).map_err(cannot)?;
        file.seek(SeekFrom::Start(end)).map_err(cannot)?;
        Ok(AnswerFile { file, path: path.to_owned(), n_done })
    }

    /// Writes a whole line at once, so that an interrupted batch can be continued.
    pub(crate) fn write(&mut self, value: &serde_json::Value) -> anyhow::Result<()> {
        let line = format!("{value}\n");
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.flush());
        written.map_err(|error| Hinted::io("write", &self.path, error))?;
        self.n_done += 1;
        Ok(())
    }
}
