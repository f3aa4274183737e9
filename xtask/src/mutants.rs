//! `cargo xtask mutants`: plants faults into copies of the kernels and sees whether the emulated tests catch them.
//!
//! A mutant is a copy of `kernels-gpu` under another name with one patch of `kernels-gpu/mutants.toml`, and the
//! tests of the workspace built against that copy. The CPU backend that they compare with is a copy too, without
//! patches: it is built once, and the project's files may change while mutants run. The project's own sources are
//! never touched, and no build of them knows of mutants.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::root;

/// Tests that mutants are held against; the first unless one says otherwise.
const TESTS: &[&str] =
    &["emulated_attention", "emulated_fp4", "emulated_mma", "emulated_preprocessing", "emulated_sm100"];

/// Longer than the tests take on any machine: a mutant that loops is caught by it.
const LIMIT: Duration = Duration::from_secs(900);

const TITLE: &str = "# Planted faults\n\nWritten by `cargo xtask mutants > docs/mutants.md`; \
    [emulation.md](emulation.md) says how to read it.\n";

/// The faults to plant.
#[derive(Deserialize)]
struct Mutants {
    mutant: Vec<Mutant>,
}

/// One patch.
#[derive(Deserialize)]
struct Mutant {
    /// What is wrong, in a few words.
    name: String,
    /// The file, below `kernels-gpu/src`.
    file: PathBuf,
    /// The test that has to catch it.
    test: Option<String>,
    /// Text that occurs there exactly once.
    search: String,
    /// What stands there instead.
    replace: String,
    /// Why the tests cannot catch it, if they cannot.
    survives: Option<String>,
}

impl Mutant {
    fn test(&self) -> &str {
        self.test.as_deref().unwrap_or(TESTS[0])
    }
}

/// What became of a mutant.
enum Fate {
    /// A test failed, with this first message.
    Caught(String),
    /// It does not compile, which proves nothing.
    Broken(String),
    /// All tests passed.
    Survived,
}

/// Runs the mutants whose names contain `filter` and prints what caught each, all of them as `docs/mutants.md`.
pub fn run(filter: Option<&str>) -> Result<()> {
    let list = root().join("kernels-gpu/mutants.toml");
    let list: Mutants = toml::from_str(&fs::read_to_string(&list)?).context("cannot read mutants.toml")?;
    let copy = Copy::new()?;
    let chosen: Vec<_> = list.mutant.iter().filter(|m| filter.is_none_or(|f| m.name.contains(f))).collect();
    for test in TESTS.iter().filter(|test| chosen.iter().any(|m| m.test() == **test)) {
        ensure!(matches!(copy.test(test)?, Fate::Survived), "{test} fails without any mutant");
    }

    let mut wrong = 0;
    if filter.is_none() {
        println!("{TITLE}");
    }
    println!("| planted fault | caught by |\n|---|---|");
    for mutant in chosen {
        let fate = copy.with(mutant, |copy| copy.test(mutant.test()))?;
        let as_expected = matches!(fate, Fate::Caught(_)) == mutant.survives.is_none();
        let text = match (&fate, &mutant.survives) {
            (Fate::Caught(message), None) => message.clone(),
            (Fate::Survived, Some(why)) => format!("*not caught:* {why}"),
            (Fate::Caught(message), Some(_)) => format!("**caught, but expected to survive:** {message}"),
            (Fate::Broken(message), _) => format!("**does not compile:** {message}"),
            (Fate::Survived, None) => "**SURVIVED**".into(),
        };
        let broken = matches!(fate, Fate::Broken(_));
        wrong += usize::from(!as_expected || broken);
        println!("| {} | {} |", mutant.name, text.replace('|', "\\|"));
    }
    ensure!(wrong == 0, "{wrong} mutants did not meet the fate that mutants.toml says");
    Ok(())
}

/// The copy that is mutated: a workspace of its own below `target/`.
struct Copy {
    folder: PathBuf,
}

impl Copy {
    /// Copies kernels and tests.
    fn new() -> Result<Self> {
        let folder = root().join("target/mutants");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        copy_folder(&root().join("kernels-gpu/src"), &folder.join("src"))?;
        copy_folder(&root().join("tests"), &folder.join("tests"))?;
        fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
        for entry in fs::read_dir(folder.join("tests"))? {
            let path = entry?.path();
            let name = path.file_stem().and_then(|n| n.to_str()).unwrap_or_default();
            if path.is_file() && !TESTS.contains(&name) {
                fs::remove_file(path)?;
            }
        }
        for source in sources(&folder.join("tests"))? {
            let text = fs::read_to_string(&source)?.replace("kernels_gpu::", "mutant::");
            fs::write(source, text)?;
        }
        fs::write(folder.join("Cargo.toml"), manifest()?)?;
        copy_backend(&folder.join("backend"))?;
        Ok(Self { folder })
    }

    /// Does something while a mutant's patch is in place.
    fn with<R>(&self, mutant: &Mutant, f: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        let path = self.folder.join("src").join(&mutant.file);
        let text = fs::read_to_string(&path).with_context(|| format!("no {}", path.display()))?;
        let count = text.matches(&mutant.search).count();
        ensure!(count == 1, "`{}`: its text occurs {count} times in {}", mutant.name, mutant.file.display());
        fs::write(&path, text.replacen(&mutant.search, &mutant.replace, 1))?;
        let result = f(self);
        fs::write(&path, text)?;
        result
    }

    /// Builds and runs a test until the first failure.
    fn test(&self, test: &str) -> Result<Fate> {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
        cargo.current_dir(&self.folder).env("CARGO_TARGET_DIR", root().join("target"));
        let build = cargo.args(["test", "--release", "--no-run", "--test", test]).output();
        let build = build.context("cannot start cargo")?;
        let text = String::from_utf8_lossy(&build.stderr).into_owned();
        if !build.status.success() {
            let line = text.lines().find(|l| l.starts_with("error")).unwrap_or("unknown error");
            return Ok(Fate::Broken(line.into()));
        }
        let mark = format!("Executable tests/{test}.rs (");
        let path = text.lines().find_map(|l| l.trim().strip_prefix(&mark)?.strip_suffix(')'));
        let path = self.folder.join(path.with_context(|| format!("cargo names no executable of {test}"))?);
        let mut run = Command::new(&path);
        // One test at a time: messages must not mix.
        run.args(["--nocapture", "--test-threads=1"]).current_dir(&self.folder).env("RUST_BACKTRACE", "0");
        run.stdout(Stdio::null()).stderr(Stdio::piped());
        let child = run.spawn().with_context(|| format!("cannot start {}", path.display()))?;
        Ok(first_failure(child)?.map_or(Fate::Survived, Fate::Caught))
    }
}

/// Reads what a test binary says until a test fails, it ends, or the time is over; then it is stopped.
fn first_failure(mut child: Child) -> Result<Option<String>> {
    let stderr = child.stderr.take().context("stderr is a pipe")?;
    let (send, lines) = mpsc::channel();
    std::thread::spawn(move || {
        BufReader::new(stderr).lines().map_while(Result::ok).try_for_each(|line| send.send(line))
    });
    let end = Instant::now() + LIMIT;
    let next = || lines.recv_timeout(end.saturating_duration_since(Instant::now()));
    let message = loop {
        match next() {
            Ok(line) if line.contains("panicked at") => {
                let message = [next().unwrap_or_default(), next().unwrap_or_default()];
                break Some(summary(&message));
            }
            Ok(_) => {}
            Err(mpsc::RecvTimeoutError::Timeout) => {
                break Some(format!("no end within {} s", LIMIT.as_secs()));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break None,
        }
    };
    if message.is_some() {
        child.kill()?;
    }
    let status = child.wait()?;
    Ok(message.or_else(|| (!status.success()).then(|| format!("the tests end with {status}"))))
}

/// What was noticed, from the first lines of a panic: the rule of a fault, or how numbers differ.
fn summary(lines: &[String; 2]) -> String {
    // Either the message, or a line that only names the case and then a fault.
    let line = if lines[0].ends_with('}') { &lines[1] } else { &lines[0] };
    // .. block (x, y, z), thread n, file:line: rule
    let rule = line.split_once("block (").and_then(|(_, fault)| fault.split_once(": ")).map(|(_, rule)| rule);
    // .. Case { .. }: how numbers differ
    let text = rule.or_else(|| line.rsplit("}: ").next()).unwrap_or_default();
    let text = text.trim_start_matches("assertion `left == right` failed: ");
    const LONGEST: usize = 150;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
}

/// The copy's manifest: the kernels' own, renamed, with what the tests need besides.
fn manifest() -> Result<String> {
    let dependencies = |path: &str, table: &str| -> Result<toml::Table> {
        let text: toml::Table = toml::from_str(&fs::read_to_string(root().join(path))?)?;
        let found = text.get(table).and_then(|t| t.as_table());
        found.cloned().with_context(|| format!("{path} has no {table}"))
    };
    let mut own = dependencies("kernels-gpu/Cargo.toml", "dependencies")?;
    for (_, dependency) in &mut own {
        if let Some(dependency) = dependency.as_table_mut() {
            dependency.remove("optional");
        }
    }
    let everything = dependencies("Cargo.toml", "dependencies")?;
    let mut tests = toml::Table::new();
    for name in ["half", "rand", "rand_distr"] {
        let value = everything.get(name).with_context(|| format!("Cargo.toml has no dependency {name}"))?;
        tests.insert(name.into(), value.clone());
    }
    let mut host = toml::Table::new();
    host.insert("path".into(), "backend".into());
    host.insert("default-features".into(), false.into());
    tests.insert("vc-attention".into(), host.into());
    let mut manifest = toml::Table::new();
    manifest.insert("dependencies".into(), own.into());
    manifest.insert("dev-dependencies".into(), tests.into());
    Ok(format!(
        "[package]\nname = \"mutant\"\nversion = \"0.0.0\"\nedition = \"2024\"\npublish = false\n\n\
         [features]\ndefault = [\"emulation\"]\nemulation = []\n\n\
         [profile.release]\ndebug = \"line-tables-only\"\nincremental = true\n\n[workspace]\nexclude = [\"backend\"]\n\n{}",
        toml::to_string(&manifest)?
    ))
}

/// Copies what the library and its CPU backend are built from.
fn copy_backend(to: &Path) -> Result<()> {
    copy_folder(&root().join("host"), &to.join("host"))?;
    copy_folder(&root().join("kernels-gpu/src"), &to.join("kernels-gpu/src"))?;
    fs::copy(root().join("build.rs"), to.join("build.rs"))?;
    for package in ["", "kernels-gpu"] {
        let text = fs::read_to_string(root().join(package).join("Cargo.toml"))?;
        let mut manifest: toml::Table = toml::from_str(&text)?;
        for unused in ["bench", "bin", "dev-dependencies", "test"] {
            manifest.remove(unused);
        }
        if let Some(workspace) = manifest.get_mut("workspace").and_then(toml::Value::as_table_mut) {
            workspace.insert("members".into(), vec!["kernels-gpu"].into());
        }
        if let Some(package) = manifest.get_mut("package").and_then(toml::Value::as_table_mut) {
            package.remove("default-run");
        }
        fs::write(to.join(package).join("Cargo.toml"), toml::to_string(&manifest)?)?;
    }
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("no {}", from.display()))? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

/// All files of a folder and those below.
fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(sources(&path)?);
        } else {
            files.push(path);
        }
    }
    Ok(files)
}
