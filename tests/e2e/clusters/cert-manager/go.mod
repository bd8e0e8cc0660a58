module diloco.dev/cert-manager

go 1.25.0

// Its CRDs are applied as they are; nothing of it is built.
require github.com/cert-manager/cert-manager v1.20.3
