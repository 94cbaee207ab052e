//! A blocking HTTP/1.1 client as plain as it can be, so that what it sees is the server's doing.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};

/// How long a client waits for bytes.
const WAIT: Duration = Duration::from_secs(30);

/// The head of an answer, and a body that may still be on its way.
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    body: BufReader<Body>,
}

enum Body {
    Plain { source: BufReader<TcpStream> },
    Chunked { source: BufReader<TcpStream>, left: usize, over: bool },
}

impl Read for Body {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain { source } => source.read(into),
            Self::Chunked { over: true, .. } => Ok(0),
            Self::Chunked { source, left, over } => {
                if *left == 0 {
                    let line = line(source)?;
                    let bad = |_| io::Error::other(format!("no chunk length: {line:?}"));
                    *left = usize::from_str_radix(&line, 16).map_err(bad)?;
                    *over = *left == 0;
                }
                let most = into.len().min(*left);
                let len = source.read(&mut into[..most])?;
                if len == 0 && !*over {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                *left -= len;
                if *left == 0 {
                    line(source)?;
                }
                Ok(len)
            }
        }
    }
}

fn line(source: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    source.read_line(&mut line)?;
    Ok(line.trim_end().to_owned())
}

/// Sends one request and reads the head of its answer.
pub(crate) fn ask(address: SocketAddr, method: &str, path: &str, body: &[u8]) -> io::Result<Answer> {
    ask_with(address, method, path, body, "")
}

/// The same with more lines of its head, each with its end.
pub(crate) fn ask_with(address: SocketAddr, method: &str, path: &str, body: &[u8], lines: &str) -> io::Result<Answer> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(WAIT))?;
    let len = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nhost: e2e\r\nconnection: close\r\n{lines}content-length: {len}\r\n\r\n");
    stream.write_all(&[head.as_bytes(), body].concat())?;
    let mut source = BufReader::new(stream);
    let start = line(&mut source)?;
    let status = start.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| io::Error::other(format!("no status: {start:?}")))?;
    let mut headers = Vec::new();
    loop {
        let line = line(&mut source)?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.push((name.to_lowercase(), value.trim().to_owned()));
    }
    let is_chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    let body = if is_chunked { Body::Chunked { source, left: 0, over: false } } else { Body::Plain { source } };
    Ok(Answer { status, headers, body: BufReader::new(body) })
}

impl Answer {
    /// The value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The whole body, as text.
    pub(crate) fn text(mut self) -> io::Result<String> {
        let mut text = String::new();
        self.body.read_to_string(&mut text)?;
        Ok(text)
    }

    /// The whole body, as JSON.
    pub(crate) fn json(self) -> io::Result<Value> {
        let text = self.text()?;
        serde_json::from_str(&text).map_err(|error| io::Error::other(format!("{error}: {text:?}")))
    }

    /// The next event of a stream; `None` once the server ended it.
    pub(crate) fn event(&mut self) -> io::Result<Option<String>> {
        loop {
            let mut line = String::new();
            if self.body.read_line(&mut line)? == 0 {
                return Ok(None);
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return Ok(Some(data.trim_end().to_owned()));
            }
        }
    }
}

/// A completion to ask for: greedy, of a fixed length, with token numbers in the answer.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub(crate) tokens: Vec<u32>,
    pub(crate) count: u32,
    /// Temperature and seed, if it is not to be greedy.
    pub(crate) random: Option<(f64, u64)>,
}

impl Wish {
    pub(crate) fn new(tokens: Vec<u32>, count: u32) -> Self {
        Self { tokens, count, random: None }
    }

    pub(crate) fn body(&self) -> Value {
        let (temperature, seed) = self.random.unwrap_or((0.0, 0));
        json!({"model": "toy", "prompt": self.tokens, "max_tokens": self.count, "temperature": temperature, "seed": seed,
            "ignore_eos": true, "return_token_ids": true})
    }
}

/// A whole answer to a [`Wish`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    pub(crate) cached: u64,
    pub(crate) finish: String,
    /// Its name for `/v1/requests/`.
    pub(crate) id: String,
}

/// Why there is none: a status and what stood with it, or a broken connection.
#[derive(Debug)]
#[allow(dead_code)] // shown by Debug
pub(crate) enum Unsaid {
    Refused(u16, Value),
    Broken(io::Error),
}

/// Asks for a whole completion.
pub(crate) fn complete(address: SocketAddr, wish: &Wish) -> Result<Said, Unsaid> {
    let body = wish.body().to_string();
    let answer = ask(address, "POST", "/v1/completions", body.as_bytes()).map_err(Unsaid::Broken)?;
    let (status, id) = (answer.status, answer.header("x-request-id").unwrap_or_default().to_owned());
    let value = answer.json().map_err(Unsaid::Broken)?;
    if status != 200 {
        return Err(Unsaid::Refused(status, value));
    }
    let choice = &value["choices"][0];
    Ok(Said {
        tokens: token_ids(choice),
        text: choice["text"].as_str().expect("an answer has text").to_owned(),
        cached: value["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("usage has details"),
        finish: choice["finish_reason"].as_str().expect("an answer says why it ended").to_owned(),
        id,
    })
}

/// The token numbers of a choice.
pub(crate) fn token_ids(choice: &Value) -> Vec<u32> {
    let ids = choice["token_ids"].as_array().expect("token numbers were asked for");
    ids.iter().map(|id| u32::try_from(id.as_u64().expect("a number")).expect("a token")).collect()
}

/// The sum of a metric's series whose labels contain `labels`.
pub(crate) fn metric(address: SocketAddr, name: &str, labels: &str) -> f64 {
    let text = ask(address, "GET", "/metrics", b"").and_then(Answer::text).expect("every node has metrics");
    let series = text.lines().filter_map(|line| line.strip_prefix(name)?.rsplit_once(' '));
    series
        .filter(|(key, _)| (key.is_empty() || key.starts_with('{')) && key.contains(labels))
        .map(|(_, value)| value.parse::<f64>().expect("a number"))
        .sum()
}
