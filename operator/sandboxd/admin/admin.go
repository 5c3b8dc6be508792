// Package admin decides whether a token is the one of the sandbox's owner.
//
// Guarantees:
//  1. An owner who is known by a public key proves itself by a signature over the member's name and its boot: what the
//     daemon knows opens nothing, and a token opens one member, until its first process starts again.
//  2. A signature is verified once; the same token again is compared, in constant time.
package admin

import (
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"sync"

	"agentfly.dev/sandboxd/lease"
)

const signed = "agentfly-admin:" // what a signature begins with, so that the key may be used elsewhere too

// Door lets the owner in. The zero value lets nobody in.
type Door struct {
	key     ed25519.PublicKey // nil where the token itself is known
	message []byte

	mu    sync.Mutex // guards what follows
	token string     // the good one; "" until it was seen
}

// ByToken is a door for an owner who gave the token.
func ByToken(token string) *Door { return &Door{token: token} }

// ByKey is a door for an owner who gave the public half of a key, in base64.
func ByKey(key, member, boot string) (*Door, error) {
	decoded, err := base64.StdEncoding.DecodeString(key)
	switch {
	case err != nil:
		return nil, fmt.Errorf("adminKey: %w: give the Ed25519 public key in base64", err)
	case len(decoded) != ed25519.PublicKeySize:
		return nil, fmt.Errorf("adminKey: has %d bytes: an Ed25519 public key has %d", len(decoded), ed25519.PublicKeySize)
	case member == "" || strings.Contains(member, ":"):
		return nil, fmt.Errorf("member: %q is empty or has a colon in it: give the name of the pod", member)
	case boot == "":
		return nil, errors.New("boot: is empty")
	}
	return &Door{key: decoded, message: []byte(signed + member + ":" + boot)}, nil
}

// Opens says whether the token is the owner's.
func (d *Door) Opens(token string) bool {
	d.mu.Lock()
	known := d.token
	d.mu.Unlock()
	if lease.Same(token, known) {
		return true
	}
	if d.key == nil {
		return false
	}
	signature, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(token, "="))
	if err != nil || !ed25519.Verify(d.key, d.message, signature) {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.token = token
	return true
}
