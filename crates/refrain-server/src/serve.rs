//! Connections: accepting them, their limits, and draining.

mod cors; // which web pages may send requests

use crate::app::{App, Limits, router};
use crate::error::ServeError;
use crate::keys::ApiKeys;
use crate::metrics::Metrics;
use crate::served::{Models, ServedModel};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use refrain_worker::TokenBackend;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{self, CertificateDer, PrivateKeyDer};
use tower_http::cors::CorsLayer;

/// Headers of a request, in all.
const MAX_HEADER_BYTES: usize = 64 << 10;
const MAX_HEADERS: usize = 100;

/// Options of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Where to listen; port 0 takes any free one.
    pub addr: SocketAddr,
    /// Who may send requests.
    pub keys: ApiKeys,
    /// Serves a public address without keys.
    pub unprotected: bool,
    /// Serves HTTPS.
    pub tls: Option<TlsFiles>,
    /// Origins whose web pages may send requests and read the answers; `*` is any.
    pub cors: Vec<String>,
    /// Maximum size of a request's body.
    pub max_body_bytes: usize,
    /// Time for the headers of a request, which is also how long an idle connection stays open.
    pub header_timeout: Duration,
    /// Time for the body of a request.
    pub body_timeout: Duration,
    /// Maximum number of connections; further ones wait to be accepted.
    pub max_connections: usize,
    /// Time that open requests have after the server was told to stop.
    pub drain: Duration,
    /// Open requests without any progress for this long mean that the server is not healthy.
    pub stall: Duration,
}

impl ServerOptions {
    /// The usual options.
    pub fn new(addr: SocketAddr) -> ServerOptions {
        ServerOptions {
            addr,
            keys: ApiKeys::default(),
            unprotected: false,
            tls: None,
            cors: Vec::new(),
            max_body_bytes: 16 << 20,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            max_connections: 16_384,
            drain: Duration::from_secs(30),
            stall: Duration::from_secs(120),
        }
    }
}

/// PEM files of a certificate.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The certificate and those that vouch for it.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl TlsFiles {
    fn acceptor(&self) -> Result<TlsAcceptor, ServeError> {
        let wrong = |path: &Path, reason: String| ServeError::Tls { path: path.to_owned(), reason };
        let of_cert = |error: pki_types::pem::Error| wrong(&self.cert, error.to_string());
        let certs = CertificateDer::pem_file_iter(&self.cert).map_err(of_cert)?;
        let certs = certs.collect::<Result<Vec<_>, _>>().map_err(of_cert)?;
        let key =
            PrivateKeyDer::from_pem_file(&self.key).map_err(|error| wrong(&self.key, error.to_string()))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(certs, key))
            .map_err(|error| wrong(&self.cert, error.to_string()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

/// A server that listens.
pub struct Server {
    app: Arc<App>,
    listener: TcpListener,
    addr: SocketAddr,
    tls: Option<TlsAcceptor>,
    cors: Option<CorsLayer>,
    options: ServerOptions,
}

/// Replaces the keys of a running server.
#[derive(Clone)]
pub struct KeyReplacer {
    app: Arc<App>,
}

impl KeyReplacer {
    /// Requests from now on need one of these keys. Keys that stay keep their counts.
    pub fn replace(&self, keys: ApiKeys) {
        let mut current = crate::metrics::lock(&self.app.keys);
        *current = Arc::new(keys.continues(&current));
    }
}

impl Server {
    /// Listens. Connections are accepted by [`Server::run`].
    pub async fn bind(
        models: Vec<ServedModel>,
        backend: Arc<dyn TokenBackend>,
        options: ServerOptions,
    ) -> Result<Server, ServeError> {
        let addr = options.addr;
        let is_local = addr.ip().is_loopback();
        if !is_local && options.keys.is_empty() && !options.unprotected {
            return Err(ServeError::Unprotected { addr });
        }
        let models = Models::new(models)?;
        let cors = cors::layer(&options.cors)?;
        let tls = options.tls.as_ref().map(TlsFiles::acceptor).transpose()?;
        let bind = |source| ServeError::Bind { addr, source };
        let listener = TcpListener::bind(addr).await.map_err(bind)?;
        let addr = listener.local_addr().map_err(bind)?;
        let limits = Limits {
            max_body_bytes: options.max_body_bytes,
            body_timeout: options.body_timeout,
            stall: options.stall,
            is_local: is_local && options.keys.is_empty(),
        };
        let app = Arc::new(App {
            models,
            backend,
            metrics: Arc::new(Metrics::new()),
            keys: Mutex::new(Arc::new(options.keys.clone())),
            limits,
            is_draining: AtomicBool::new(false),
        });
        Ok(Server { app, listener, addr, tls, cors, options })
    }

    /// The address, with the port that was taken.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Replaces the keys while the server runs.
    pub fn key_replacer(&self) -> KeyReplacer {
        KeyReplacer { app: self.app.clone() }
    }

    /// Serves until `stop` is ready; then open requests have some time to end. Returns how many did not.
    pub async fn run(self, stop: impl Future<Output = ()>) -> usize {
        let (stopping, stopped) = watch::channel(false);
        let places = Arc::new(Semaphore::new(self.options.max_connections));
        let routes = router(self.app.clone());
        // Outside of everything else: a browser asks without the key whether it may send one.
        let service = TowerToHyperService::new(match self.cors {
            Some(cors) => routes.layer(cors),
            None => routes,
        });
        let mut connections = JoinSet::new();
        let metrics = self.app.metrics.clone();
        let mut second = tokio::time::interval(Duration::from_secs(1));
        tokio::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                _ = second.tick() => {
                    metrics.sample_rate(Instant::now());
                    while connections.try_join_next().is_some() {}
                    continue;
                }
                accepted = accept(&self.listener, &places) => accepted,
            };
            let Some((stream, place)) = accepted else { continue };
            let (service, stopped) = (service.clone(), stopped.clone());
            let (tls, header_timeout) = (self.tls.clone(), self.options.header_timeout);
            connections.spawn(async move {
                // Held until the connection ends.
                let _place = place;
                let Some(tls) = tls else {
                    return serve_connection(stream, service, header_timeout, stopped).await;
                };
                match tokio::time::timeout(header_timeout, tls.accept(stream)).await {
                    Ok(Ok(stream)) => serve_connection(stream, service, header_timeout, stopped).await,
                    Ok(Err(error)) => tracing::debug!(%error, "a connection is not TLS"),
                    Err(_) => tracing::debug!("a TLS handshake took too long"),
                }
            });
        }
        drop(self.listener);
        self.app.is_draining.store(true, Ordering::Relaxed);
        stopping.send_replace(true);
        let ended = async { while connections.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(self.options.drain, ended).await;
        metrics.n_open.load(Ordering::Relaxed)
    }
}

/// Accepts a connection when there is a place for it.
async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            // Without it, an event may wait for the acknowledgement of the one before.
            let _ = stream.set_nodelay(true);
            Some((stream, place))
        }
        Err(error) => {
            // The process has no file handles left, for example: some connection has to end first.
            tracing::warn!(%error, "a connection was not accepted");
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
    }
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    service: TowerToHyperService<axum::Router>,
    header_timeout: Duration,
    mut stopped: watch::Receiver<bool>,
) {
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .max_buf_size(MAX_HEADER_BYTES)
        .max_headers(MAX_HEADERS);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let served = tokio::select! {
        served = &mut connection => served,
        () = async { drop(stopped.wait_for(|stopped| *stopped).await) } => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        // Clients go away as they like.
        tracing::debug!(%error, "a connection ended");
    }
}
