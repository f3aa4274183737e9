//! How a command ends when it does not end well: one line, perhaps a hint, an exit code.

use std::io::{self, Write};
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use vc_attention::Error;

pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a command stopped.
#[derive(Debug)]
pub enum Failure {
    /// Something to tell the user.
    Told {
        /// 1: failed, 2: bad usage or input.
        code: u8,
        message: String,
        hint: Option<String>,
    },
    /// Whoever read standard output has gone; there is nobody to tell and nothing wrong.
    ReaderGone,
}

impl Failure {
    /// Exit code 1: the request was sound but could not be carried out.
    pub fn failed(message: impl Into<String>) -> Self {
        Failure::Told { code: 1, message: message.into(), hint: None }
    }

    /// Exit code 2: the request or its input is wrong.
    pub fn usage(message: impl Into<String>) -> Self {
        Failure::Told { code: 2, message: message.into(), hint: None }
    }

    /// A result that could not be written: the library's error, but not the input's fault.
    pub fn write(error: Error) -> Self {
        Failure::failed(error.to_string())
    }

    pub fn with_hint(mut self, text: impl Into<String>) -> Self {
        if let Failure::Told { hint, .. } = &mut self {
            *hint = Some(text.into());
        }
        self
    }

    /// Writes the message to standard error.
    pub fn report(&self) -> ExitCode {
        let Failure::Told { code, message, hint } = self else { return ExitCode::SUCCESS };
        let error = AnsiColor::Red.on_default().bold();
        let mut text = format!("{error}error:{error:#} {message}\n");
        if let Some(hint) = hint {
            let style = Style::new().bold();
            text += &format!(" {style}hint:{style:#} {hint}\n");
        }
        // When standard error is closed the exit code has to do.
        let _ = anstream::stderr().write_all(text.as_bytes());
        ExitCode::from(*code)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let hint = hint(&error);
        let failure = match error {
            Error::Device { .. } => Failure::failed(error.to_string()),
            _ => Failure::usage(error.to_string()),
        };
        match hint {
            Some(hint) => failure.with_hint(hint),
            None => failure,
        }
    }
}

fn hint(error: &Error) -> Option<&'static str> {
    Some(match error {
        Error::NonFinite { tensor: "o", .. } => "finite inputs overflowed f32 on the way: scale them down",
        Error::NonFinite { .. } => {
            "--allow-nonfinite goes on: a NaN or infinity in q then makes its output row NaN, one in k or v its head"
        }
        Error::Option { option: "grid", .. } => {
            "give the latent grid of the tokens with --grid T,H,W, or as the file's metadata `grid`"
        }
        Error::Recipe { .. } => "`vca compare --help` lists recipes and modifiers",
        Error::Tensor { .. } => {
            "the axes are taken as [batch, heads, tokens, dim]; for [batch, tokens, heads, dim] give --layout bshd"
        }
        Error::File { .. } => {
            "an input is a safetensors file with q, k and v in F32, F16 or BF16, as [heads, tokens, dim] or with a \
             batch in front"
        }
        _ => return None,
    })
}

/// Writes to standard output, colours only where it is a terminal.
pub fn print(text: &str) -> Result<()> {
    let mut out = anstream::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::ReaderGone),
        Err(error) => Err(Failure::failed(format!("standard output: {error}"))),
    }
}

/// Writes a remark to standard error; a command does not fail for want of one.
pub fn note(text: &str) {
    let style = AnsiColor::Yellow.on_default().bold();
    let _ = writeln!(anstream::stderr(), "{style}note:{style:#} {text}");
}
